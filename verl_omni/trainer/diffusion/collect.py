"""One sweep of rollouts: generate, and score each image as it arrives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_omni.trainer.diffusion.batch import ScoredSample
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

if TYPE_CHECKING:
    from verl_omni.reward_loop.item import RewardResult

logger = logging.getLogger(__name__)

MAX_FAILED = 0.5
"""Share of a sweep's requests that may fail: beyond it something is wrong with the run, not with a prompt."""

Generate = Callable[[Sequence[Sequence[RolloutRequest]]], AsyncIterator[RolloutSample | RolloutError]]
"""Submits groups of requests, and gives each result as it comes."""
Score = Callable[[str, RolloutRequest, RolloutSample], Awaitable["RewardResult"]]
"""The reward of one sample of the group of that id."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep gave."""

    samples: list[ScoredSample]
    """In the order of the requests, without those that failed."""
    failures: list[str]
    """Why the others failed."""
    generation_s: float
    """From the submission to the last image."""
    reward_s: float
    """From the last image to the last score."""


async def collect(groups: Mapping[str, Sequence[RolloutRequest]], generate: Generate, score: Score) -> Sweep:
    """Run all `groups` (id → requests) and score every sample while others are still being made.

    A request that fails, or whose sample can't be scored, is logged and left out. Raises :class:`TrainingError` if that
    are more than `MAX_FAILED` of them.
    """
    group_of = {request.request_id: uid for uid, requests in groups.items() for request in requests}
    requests = {request.request_id: request for members in groups.values() for request in members}
    failures: list[str] = []
    scoring: dict[str, tuple[RolloutSample, asyncio.Task[RewardResult]]] = {}
    start = time.perf_counter()
    try:
        async for result in generate(list(groups.values())):
            if isinstance(result, RolloutError):
                failures.append(str(result))
                continue
            request_id = result.request_id
            task = asyncio.ensure_future(score(group_of[request_id], requests[request_id], result))
            scoring[request_id] = result, task
        generated = time.perf_counter()
        rewards = await asyncio.gather(*(task for _, task in scoring.values()), return_exceptions=True)
    except BaseException:
        for _, task in scoring.values():
            task.cancel()
        raise
    scored = {}
    for (request_id, (sample, _)), reward in zip(scoring.items(), rewards, strict=True):
        if isinstance(reward, Exception):
            failures.append(str(reward))
        elif isinstance(reward, BaseException):
            raise reward
        else:
            scored[request_id] = ScoredSample(
                uid=group_of[request_id], request=requests[request_id], sample=sample, reward=reward
            )
    if failures:
        logger.error("%d of %d left out; the first: %s", len(failures), len(requests), failures[0])
    if len(failures) > MAX_FAILED * len(requests):
        raise TrainingError(f"{len(failures)} of {len(requests)} requests failed; the first: {failures[0]}")
    return Sweep(
        samples=[scored[request_id] for request_id in requests if request_id in scored],
        failures=failures,
        generation_s=generated - start,
        reward_s=time.perf_counter() - generated,
    )
