"""Stable Diffusion 3 and 3.5 in training."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from verl_omni.pipelines.sd3.rules import StableDiffusion3Rules
from verl_omni.pipelines.training import JOINT_ATTENTION, DiffusionModelBase


@DiffusionModelBase.register("StableDiffusion3Pipeline")
class StableDiffusion3Training(StableDiffusion3Rules, DiffusionModelBase):
    """As for the rollout, latents come unpacked."""

    transformer_class = "SD3Transformer2DModel"
    extra_conditions = ("pooled_prompt_embeds",)
    default_target_modules: ClassVar = [*JOINT_ATTENTION]

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.patch_size = self.transformer_config["patch_size"]
