"""The training side of a model: its transformer from diffusers, and the score of a recorded step under it.

A training class shares the rules of its rollout adapter (schedule, guidance, what the transformer is given) by way of a
common base, :class:`~verl_omni.pipelines.hooks.ModelRules`. So the score of a step under the policy that took it is
the log-prob that the rollout recorded, to rounding. Nothing here needs the engine.

Legend: B rows of a batch, b rows of one forward, W recorded steps, L text tokens, D text width, ``...`` the latent
dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from verl_omni.algorithms.flow_sde import StepCoefficients, sde_step
from verl_omni.pipelines.hooks import ModelRules
from verl_omni.pipelines.prompt_cache import NEGATIVE
from verl_omni.pipelines.registry import Registry
from verl_omni.pipelines.rows import TextBatch
from verl_omni.pipelines.schedule import StepTables

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Linear layers of diffusers' attention over image and text together."""
_TIMESTEP_RTOL = 1e-6
"""Above float32's rounding, below bfloat16's, which moves 889 to 888."""


@dataclass(frozen=True, kw_only=True)
class StepKnobs:
    """What all rows of a batch have in common."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_inference_steps: int
    noise_level: float
    sde_type: str
    dtype: torch.dtype | None = None
    """Of the transformer's inputs, timesteps excepted; None: of its parameters. To be given where it computes in
    another dtype than it is stored in, as FSDP2 does under a mixed-precision policy."""


class StepScore(NamedTuple):
    """A step that was taken, under the transformer at hand."""

    log_prob: Tensor
    """[b] float32."""
    mean: Tensor
    """[b, ...] float32, of the distribution of the next latents."""
    std: Tensor
    """[b] float32, :attr:`StepCoefficients.std`: what FlowGRPO's KL divides by."""


class DiffusionModelBase(ModelRules, Registry):
    """Put it right of the model's rules: ``class MyTraining(MyRules, DiffusionModelBase)``."""

    _kind = "training model"
    _built_in = ("verl_omni.pipelines.qwen_image.training", "verl_omni.pipelines.sd3.training")
    _classes: ClassVar[dict[tuple[str, str], type]] = {}

    transformer_class: ClassVar[str]
    """Name of the transformer's class in diffusers."""
    default_target_modules: ClassVar[list[str]]
    """Modules that get a LoRA, by the ends of their names."""
    extra_conditions: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that the transformer takes beside the text; they reach it in ``text.extra``."""

    def __init__(self, path: str | Path) -> None:
        """`path`: the checkpoint in diffusers layout. Reads its configs, no weights."""
        import diffusers

        self.path = str(path)
        self.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(self.path, subfolder="scheduler")
        cls = getattr(diffusers, self.transformer_class)
        self.transformer_config: Mapping[str, Any] = cls.load_config(self.path, subfolder="transformer")
        self._tables = StepTables(self.schedule)

    # ---- what a model's rules write

    def schedule(self, steps: int, image_tokens: int) -> tuple[Tensor, Tensor]:
        """Timesteps [T] in 0–1000 and sigmas [T+1], as the rollout's; not asked for a single step."""
        raise NotImplementedError

    def transformer_inputs(
        self, latents: Tensor, timesteps: Tensor, text: TextBatch, size: tuple[int, int]
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer.

        Args:
            latents: [b, ...] in the transformer's dtype.
            timesteps: [b] float32 in 0–1000.
            text: in the transformer's dtype.
            size: (height, width) in pixels.
        """
        raise NotImplementedError

    # ---- what comes with it

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The checkpoint's transformer, in `dtype` on the host. Raises OSError if its weights are no safetensors."""
        import diffusers

        cls = getattr(diffusers, self.transformer_class)
        transformer: nn.Module = cls.from_pretrained(
            self.path, subfolder="transformer", torch_dtype=dtype, use_safetensors=True
        )
        return transformer

    def score_step(
        self, transformer: nn.Module, rows: Mapping[str, Tensor], column: int, knobs: StepKnobs
    ) -> StepScore:
        """Score the recorded step `column` of each row under `transformer`; differentiable in its parameters.

        Args:
            transformer: as :meth:`load_transformer` gives it, LoRA and FSDP2 around it or not.
            rows: b rows, on the transformer's device.

                - ``all_latents`` float32 [b, W+1, ...]; ``all_timesteps`` float32 [b, W]; ``sde_steps`` int64 [b, W],
                  the place of each recorded step in the schedule
                - ``prompt_embeds`` [b, L, D], padded on the right; ``prompt_embeds_mask`` bool [b, L], true on valid
                  tokens, or absent where all are; those of :attr:`extra_conditions`
                - where guidance is on, all of the last line with ``negative_`` before their names, and ``cfg_scale``
                  float32 [b]; at a scale of 1 the row is not guided

            column: 0 … W - 1.

        The transformer runs twice if the rows carry negative prompts, whatever their scales are: under FSDP2 each rank
        has to call it equally often.

        Raises:
            ValueError: timesteps that are not the schedule's, guided rows without negative prompts, or texts of
                different lengths for a model without a text mask.
        """
        latents, taken = rows["all_latents"][:, column].float(), rows["all_latents"][:, column + 1].float()
        timesteps = rows["all_timesteps"][:, column].float()
        tokens = self.image_tokens(tuple(latents.shape[1:]))
        table = self._tables.sde_table(knobs.num_inference_steps, tokens, knobs.noise_level, knobs.sde_type)
        expected, *columns = table.to(latents.device)[rows["sde_steps"][:, column]].unbind(1)
        if not torch.allclose(timesteps, expected, rtol=_TIMESTEP_RTOL, atol=0):
            raise ValueError(
                f"the rows have timesteps {timesteps.tolist()} where {knobs.num_inference_steps} steps have "
                f"{expected.tolist()}; give the rollout's num_inference_steps, and its timesteps unrounded"
            )
        coefficients = StepCoefficients(*columns)
        velocity = self._velocity(transformer, rows, latents, timesteps, knobs)
        step = sde_step(latents, velocity, coefficients, next_latents=taken)
        return StepScore(step.log_prob, step.mean, coefficients.std)

    def _velocity(
        self, transformer: nn.Module, rows: Mapping[str, Tensor], latents: Tensor, timesteps: Tensor, knobs: StepKnobs
    ) -> Tensor:
        """Guided velocity [b, ...] float32."""
        dtype = knobs.dtype or next(transformer.parameters()).dtype

        def predict(side: str) -> Tensor:
            text = self._text(rows, side, dtype)
            inputs = self.transformer_inputs(latents.to(dtype), timesteps, text, (knobs.height, knobs.width))
            velocity: Tensor = transformer(**inputs, return_dict=False)[0]
            return velocity.float()

        if f"{NEGATIVE}prompt_embeds" in rows:
            cond, scale = predict(""), rows["cfg_scale"].float().view((-1,) + (1,) * (latents.ndim - 1))
            return torch.where(scale == 1, cond, self.guide(cond, predict(NEGATIVE), scale))
        if "cfg_scale" in rows and bool((rows["cfg_scale"] != 1).any()):
            raise ValueError("some rows have a cfg_scale other than 1; give negative_prompt_embeds to guide them by")
        return predict("")

    def _text(self, rows: Mapping[str, Tensor], side: str, dtype: torch.dtype) -> TextBatch:
        """One side's text of `rows`, cut to the longest of them: masked as the rollout masks it."""
        embeds, mask = rows[f"{side}prompt_embeds"], rows.get(f"{side}prompt_embeds_mask")
        if mask is not None:
            lengths = mask.sum(1).tolist()
            longest = max(lengths)
            embeds, mask = embeds[:, :longest], mask[:, :longest].bool()
            if min(lengths) == longest:
                mask = None
            elif not self.masks_text:
                raise ValueError(f"this model takes no text mask, so its texts must be of one length, not {lengths}")
        extra = {name: rows[side + name].to(dtype) for name in self.extra_conditions}
        return TextBatch(embeds=embeds.to(dtype), mask=mask, extra=extra)
