"""What a rollout of Qwen-Image and its training do alike.

Legend: B rows, S image tokens (2×2 latent patches), C packed channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl_omni.pipelines.flow_schedule import flow_schedule
from verl_omni.pipelines.hooks import ModelRules
from verl_omni.pipelines.rows import TextBatch


class QwenImageRules(ModelRules):
    """Rows of other text lengths share a forward, under a mask; guidance keeps norms."""

    default_cfg_scale = 4.0

    scheduler: Any
    vae_scale_factor: int
    """Pixels along the edge of one latent."""

    @property
    def patch(self) -> int:
        """Pixels along the edge of one image token."""
        return 2 * self.vae_scale_factor

    def schedule(self, steps: int, image_tokens: int) -> tuple[Tensor, Tensor]:
        """Timesteps [T] in 0–1000 and sigmas [T+1]."""
        return flow_schedule(self.scheduler, steps, image_tokens, even=True)

    def transformer_inputs(
        self, latents: Tensor, timesteps: Tensor, text: TextBatch, size: tuple[int, int]
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer: `latents` [B, S, C], `timesteps` [B] in 0–1000, `size` in pixels."""
        return {
            "hidden_states": latents,
            "timestep": timesteps / 1000,
            "encoder_hidden_states": text.embeds,
            "encoder_hidden_states_mask": text.mask,
            "img_shapes": [[(1, size[0] // self.patch, size[1] // self.patch)]] * len(latents),
        }

    def guide(self, cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
        """Guidance that keeps each token's norm (Qwen-Image's own rule)."""
        guided = super().guide(cond, uncond, scale)
        return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


def refuse_distilled(guidance_embeds: bool) -> None:
    """Raises NotImplementedError for a transformer that takes the guidance scale as an input."""
    if guidance_embeds:
        raise NotImplementedError("guidance-distilled Qwen-Image checkpoints are not supported yet")
