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
        rollout = state.extra["rollout"]
        rounded = rollout.latents = rollout.latents.bfloat16().float()
        for row, latents in zip(rollout.rows, rounded, strict=True):
            if row.latents:
                row.latents[-1] = latents


class FailsTogether(QwenImageRollout):
    """Lets one bad forward fail every request of the batch."""

    def advance(self, states):
        batch = self._batch = self._batch or self.gather(states)
        velocity = self.guided_velocity(batch)
        batch.advance(velocity)
        return velocity


class RoundedTimesteps(QwenImageRollout):
    """Casts timesteps to the model's dtype, as latents are."""

    def predict_velocity(self, latents, timesteps, text, size):
        return super().predict_velocity(latents, timesteps.to(self.od_config.dtype), text, size)


class SharedStorage(QwenImageRollout):
    """Hands out views of the whole batch's tensors."""

    def post_decode(self, state, **kwargs):
        output = super().post_decode(state, **kwargs)
        output.output["payload"]["image"] = state.extra["rollout"].media
        return output


class NeverEncodes(QwenImageRollout):
    """Fails for every request before its first step, but for the engine's own at its start."""

    started = False

    def encode(self, ids, max_sequence_length):
        if self.started:
            raise RuntimeError("planted")
        self.started = True
        return super().encode(ids, max_sequence_length)
