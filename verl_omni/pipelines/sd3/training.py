"""Stable Diffusion 3 and 3.5 in training."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from verl_omni.pipelines.sd3.rules import StableDiffusion3Rules
from verl_omni.pipelines.training import DiffusionModelBase


@DiffusionModelBase.register("StableDiffusion3Pipeline")
class StableDiffusion3Training(StableDiffusion3Rules, DiffusionModelBase):
    """As for the rollout, latents come unpacked."""

    transformer_class = "SD3Transformer2DModel"
    extra_conditions = ("pooled_prompt_embeds",)
    default_target_modules: ClassVar = [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ]

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.patch_size = self.transformer_config["patch_size"]
