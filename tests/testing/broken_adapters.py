"""Adapters with the faults that the conformance suite is there to find."""

from __future__ import annotations

import torch

from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout


class SharedNoise(QwenImageRollout):
    """Draws initial latents from the process's generator."""

    def draw_latents(self, height, width, generator):
        return torch.randn(self.latent_shape(height, width))


class FirstScaleForAll(QwenImageRollout):
    """Guides the whole batch with the first request's scale."""

    def guide(self, cond, uncond, scale):
        return super().guide(cond, uncond, scale[:1])


class RoundedLatents(QwenImageRollout):
    """Keeps latents in bfloat16 after the log-prob is taken."""

    def step_scheduler(self, state, noise_pred, **kwargs):
        super().step_scheduler(state, noise_pred, **kwargs)
        rounded = state.latents.bfloat16().float()
        state.latents = rounded
        for row, latents in zip(state.extra["rollout"].rows, rounded, strict=True):
            if row.latents:
                row.latents[-1] = latents


class FailsTogether(QwenImageRollout):
    """Lets one bad forward fail every request of the batch."""

    def _velocity(self, batch):
        return self.guided_velocity(batch)
