"""What a rollout of Stable Diffusion 3 and its training do alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl_omni.pipelines.flow_schedule import flow_schedule
from verl_omni.pipelines.hooks import ModelRules
from verl_omni.pipelines.rows import TextBatch


class StableDiffusion3Rules(ModelRules):
    """The padding of both CLIP and T5 is part of the model's input: it attends to it without a mask."""

    masks_text = False
    cfg_key = "guidance_scale"
    default_cfg_scale = 7.0

    scheduler: Any
    patch_size: int
    """Latents along the edge of one image token."""

    def schedule(self, steps: int, image_tokens: int) -> tuple[Tensor, Tensor]:
        """Timesteps [T] in 0–1000 and sigmas [T+1]."""
        return flow_schedule(self.scheduler, steps, image_tokens, even=False)

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Image tokens of latents [C, h, w]."""
        return latent_shape[1] * latent_shape[2] // self.patch_size**2

    def transformer_inputs(
        self, latents: Tensor, timesteps: Tensor, text: TextBatch, size: tuple[int, int]
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer: `latents` [B, C, h, w], `timesteps` [B] in 0–1000, `size` in pixels."""
        return {
            "hidden_states": latents,
            "timestep": timesteps,
            "encoder_hidden_states": text.embeds,
            "pooled_projections": text.extra["pooled_prompt_embeds"],
        }
