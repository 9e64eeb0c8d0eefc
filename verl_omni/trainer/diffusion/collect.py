"""One sweep of rollouts: generate, and score each image as it arrives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_omni.trainer.diffusion.batch import ScoredSample
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.trainer.failures import by_reason
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

if TYPE_CHECKING:
    from verl_omni.reward_loop.item import RewardResult
    from verl_omni.trainer.diffusion.data import PromptGroup

logger = logging.getLogger(__name__)

MAX_FAILED = 0.5
"""Share of a sweep's requests that may fail: beyond it something is wrong with the run, not with a prompt."""

Generate = Callable[[Sequence[Sequence[RolloutRequest]]], AsyncIterator[RolloutSample | RolloutError]]
"""Submits groups of requests, and gives each result as it comes."""
Score = Callable[["PromptGroup", RolloutRequest, RolloutSample], Awaitable["RewardResult"]]
"""The reward of one sample of that group."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep gave."""

    samples: list[ScoredSample]
    """In the order of the requests, without those that failed."""
    failures: dict[str, Exception]
    """Id of a request that failed → why."""
    aborted: int
    """How many of these were aborted."""
    generation_s: float
    """From the submission to the last image."""
    reward_s: float
    """From the last image to the last score."""


async def collect(groups: Sequence[PromptGroup], generate: Generate, score: Score) -> Sweep:
    """Run all `groups` and score every sample while others are still being made.

    A request that fails, or whose sample can't be scored, is left out; one log line a reason names the prompts. Raises
    :class:`TrainingError`, which names them too, if that are more than `MAX_FAILED` of them.
    """
    group_of = {request.request_id: group for group in groups for request in group.requests}
    requests = {request.request_id: request for group in groups for request in group.requests}
    failures: dict[str, Exception] = {}
    aborted = 0
    scoring: dict[str, tuple[RolloutSample, asyncio.Task[RewardResult]]] = {}
    start = time.perf_counter()
    try:
        async for result in generate([group.requests for group in groups]):
            if isinstance(result, RolloutError):
                failures[str(result.request_id)] = result
                aborted += result.aborted
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
            failures[request_id] = reward
        elif isinstance(reward, BaseException):
            raise reward
        else:
            scored[request_id] = ScoredSample(
                uid=group_of[request_id].uid, request=requests[request_id], sample=sample, reward=reward
            )
    prompts = {request_id: f"{group.row.source} ({group.uid})" for request_id, group in group_of.items()}
    told = list(by_reason(failures, prompts, "images"))
    for line in told:
        logger.error("left out: %s", line)
    if len(failures) > MAX_FAILED * len(requests):
        raise TrainingError(f"more than half failed, {len(failures)} of {len(requests)} images: {'; '.join(told)}")
    return Sweep(
        samples=[scored[request_id] for request_id in requests if request_id in scored],
        failures=failures,
        aborted=aborted,
        generation_s=generated - start,
        reward_s=time.perf_counter() - generated,
    )
