"""The rollout adapters with a transformer of random weights, for the folders of :mod:`~verl_omni.bench.full_size`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout
from verl_omni.pipelines.sd3.rollout import StableDiffusion3Rollout


class RandomWeights:
    """Left of an adapter: no transformer checkpoint is read, the weights are drawn on the device."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights_sources: list[Any] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Small enough that activations stay finite through 60 layers; norms start at 1, biases at 0."""
        self.transformer.load_weights(())  # type: ignore[attr-defined]  # notes which layers are packed, for LoRAs
        generator = torch.Generator(device=self.device).manual_seed(0)  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, parameter in self.transformer.named_parameters():  # type: ignore[attr-defined]
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.02, generator=generator)
                else:
                    parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        return {name for name, _ in self.named_parameters()}  # type: ignore[attr-defined]


class QwenImageRandom(RandomWeights, QwenImageRollout):
    """Qwen-Image with random weights."""


class StableDiffusion3Random(RandomWeights, StableDiffusion3Rollout):
    """SD3.5 with random weights."""


ADAPTERS: dict[str, type] = {"qwen_image": QwenImageRandom, "sd3": StableDiffusion3Random}
