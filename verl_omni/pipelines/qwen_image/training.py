"""Qwen-Image in training."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from verl_omni.pipelines.qwen_image.rules import QwenImageRules, refuse_distilled
from verl_omni.pipelines.training import JOINT_ATTENTION, DiffusionModelBase


@DiffusionModelBase.register("QwenImagePipeline")
class QwenImageTraining(QwenImageRules, DiffusionModelBase):
    """Raises NotImplementedError for a guidance-distilled checkpoint."""

    transformer_class = "QwenImageTransformer2DModel"
    default_target_modules: ClassVar = [
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    ]

    def __init__(self, path: str | Path) -> None:
        from diffusers import AutoencoderKLQwenImage

        super().__init__(path)
        refuse_distilled(self.transformer_config.get("guidance_embeds", False))
        vae = AutoencoderKLQwenImage.load_config(self.path, subfolder="vae")
        self.vae_scale_factor = 2 ** len(vae["temperal_downsample"])
