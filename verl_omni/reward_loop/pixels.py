"""Scores of the pixels alone; no prompt is read."""

from __future__ import annotations

import io

from verl_omni.reward_loop.item import RewardItem
from verl_omni.workers.config.scorers import CHANNELS, BrightnessConfig, ColorConfig, JpegCompressibilityConfig


class _Pixels:
    async def close(self) -> None:
        """There is nothing to close."""


class JpegIncompressibilityScorer(_Pixels):
    """The size of the image as JPEG, in kB (1000 bytes), as in DDPO (Black et al., 2023)."""

    def __init__(self, config: JpegCompressibilityConfig) -> None:
        self._quality = config.quality

    def score(self, item: RewardItem) -> float:
        """kB, above 0."""
        file = io.BytesIO()
        item.pil_image().save(file, "JPEG", quality=self._quality)
        return len(file.getvalue()) / 1000


class JpegCompressibilityScorer(JpegIncompressibilityScorer):
    """Minus that size."""

    def score(self, item: RewardItem) -> float:
        """-kB, below 0."""
        return -super().score(item)


class BrightnessScorer(_Pixels):
    """Mean of all values, 0 to 1."""

    def __init__(self, config: BrightnessConfig) -> None:
        del config

    def score(self, item: RewardItem) -> float:
        """mean(image) / 255."""
        return item.image.double().mean().item() / 255


class ColorScorer(_Pixels):
    """How much one channel outshines the other two, -1 to 1."""

    def __init__(self, config: ColorConfig) -> None:
        self._channel = CHANNELS.index(config.channel)

    def score(self, item: RewardItem) -> float:
        """(mean of the channel - mean of the other two) / 255."""
        means = item.image.double().mean(dim=(1, 2)) / 255
        own = means[self._channel].item()
        return own - (means.sum().item() - own) / 2
