"""Rollout samples made by hand."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from verl_omni.reward_loop.item import RewardResult
from verl_omni.trainer.diffusion.batch import ScoredSample
from verl_omni.workers.rollout.request import RolloutRequest, RolloutSample


def scored(
    name: str,
    *,
    uid: str = "group",
    reward: float = 0.0,
    steps: int = 2,
    start: int = 0,
    length: int = 3,
    negative_length: int | None = None,
    **knobs,
) -> ScoredSample:
    """A sample whose tensors all hold other numbers than those of another `name`."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    embeddings = {"prompt_embeds": draw(length, 4), "pooled_prompt_embeds": draw(6)}
    if negative_length is not None:
        embeddings |= {"negative_prompt_embeds": draw(negative_length, 4), "negative_pooled_prompt_embeds": draw(6)}
    sample = RolloutSample(
        request_id=name,
        images=torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
        latents=None,
        trajectory_latents=draw(1, steps + 1, 5, 7),
        trajectory_log_probs=draw(1, steps),
        trajectory_timesteps=draw(1, steps),
        prompt_embeddings=embeddings,
        sde_windows=[(start, start + steps)],
        seed=0,
        policy_version=4,
        peak_memory_mb=0.0,
        queue_wait_s=0.0,
    )
    request = RolloutRequest(request_id=name, prompt=name, **knobs)
    return ScoredSample(uid=uid, request=request, sample=sample, reward=RewardResult(total=reward, parts={}))
