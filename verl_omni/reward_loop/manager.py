"""Scores images with all scorers of a run at once."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

from verl_omni.reward_loop.function import FunctionScorer
from verl_omni.reward_loop.http import HttpScorer
from verl_omni.reward_loop.item import RewardError, RewardItem, RewardResult, ScoreError, Scorer, read_score
from verl_omni.reward_loop.ocr import OcrScorer
from verl_omni.reward_loop.pixels import (
    BrightnessScorer,
    ColorScorer,
    JpegCompressibilityScorer,
    JpegIncompressibilityScorer,
)
from verl_omni.reward_loop.tasks import Tasks
from verl_omni.reward_loop.threads import HangingError, Threads
from verl_omni.reward_loop.vlm import VlmScorer
from verl_omni.utils.secrets import scrubbed
from verl_omni.workers.config.reward import RewardConfig

SCORERS: dict[str, Any] = {
    "ocr": OcrScorer,
    "vlm": VlmScorer,
    "http": HttpScorer,
    "function": FunctionScorer,
    "jpeg_compressibility": JpegCompressibilityScorer,
    "jpeg_incompressibility": JpegIncompressibilityScorer,
    "brightness": BrightnessScorer,
    "color": ColorScorer,
}
"""``type`` of a scorer → the class that is made from its config."""


class RewardManager:
    """All scorers of a run. Its coroutines belong to one event loop."""

    def __init__(self, config: RewardConfig) -> None:
        named = config.named_scorers()
        self._weights = {name: scorer.weight for name, scorer in named.items()}
        self._scorers: dict[str, Scorer] = {name: SCORERS[scorer.TYPE](scorer) for name, scorer in named.items()}
        self._threads = Threads(config.num_workers)
        self._tasks = Tasks()
        self._timeout_s = config.timeout_s

    async def score(self, item: RewardItem) -> RewardResult:
        """The weighted sum of all scores of `item`, whose scorers run side by side.

        Raises :class:`RewardError` if one of them fails or gives no finite number; the others are then given up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(self._one(name, item)) for name in self._scorers}
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
            raise error from error.__cause__
        found = {name: task.result() for name, task in tasks.items()}
        total = sum(self._weights[name] * score for name, (score, _) in found.items())
        if not math.isfinite(total):
            raise RewardError(" + ".join(found), item.request_id, "the weighted sum is too large")
        parts = {name: score for name, (score, _) in found.items()}
        for name, (_, further) in found.items():
            parts |= {f"{name}/{key}": value for key, value in further.items()}
        return RewardResult(total=total, parts=parts)

    async def close(self) -> None:
        """Close connections and threads. Scores that have not begun are given up; running ones are not waited for.

        Async functions that were given up get a few seconds to end.
        """
        self._threads.close()
        for scorer in self._scorers.values():
            await scorer.close()
        await self._tasks.close()

    async def __aenter__(self) -> RewardManager:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _one(self, name: str, item: RewardItem) -> tuple[float, dict[str, float]]:
        score = self._scorers[name].score
        try:
            if inspect.iscoroutinefunction(score):
                result = await score(item)
            else:
                result = await self._threads.run(lambda: score(item), self._timeout_s)
                if inspect.isawaitable(result):
                    result = await self._tasks.run(result, self._timeout_s)
            return read_score(result)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            reason = "CancelledError: what it waited for was cancelled"
            raise RewardError(name, item.request_id, reason) from error
        except (Exception, SystemExit) as error:  # of a function that takes itself for a script
            kind = "" if isinstance(error, (ScoreError, HangingError)) else f"{type(error).__name__}: "
            raise RewardError(name, item.request_id, scrubbed(f"{kind}{error}")) from error
