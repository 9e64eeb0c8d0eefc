"""Adapters that tell each forward in a file: the engine's counters can only be read between steps or waves."""

from __future__ import annotations

import os

from tests.workers.engines import FORWARDS
from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout
from verl_omni.pipelines.sd3.rollout import StableDiffusion3Rollout


class _Telling:
    """Appends one byte a denoising step, the number of its rows, once it is done."""

    def denoise_step(self, input_batch, **kwargs):
        velocity = super().denoise_step(input_batch, **kwargs)
        with open(os.environ[FORWARDS], "ab") as file:
            file.write(bytes([len(velocity)]))
        return velocity


class TellingQwen(_Telling, QwenImageRollout):
    """Qwen-Image, telling."""


class TellingSD3(_Telling, StableDiffusion3Rollout):
    """Stable Diffusion 3.5, telling."""


class StepOnlyQwen(TellingQwen):
    """Takes no batch of whole requests."""

    supports_request_batch = False
