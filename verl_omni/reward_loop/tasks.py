"""Tasks for coroutines that may never end, even if they are cancelled.

One that takes too long is given up: it is cancelled a few times, as retrying code may take the first for a failed
attempt, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from verl_omni.reward_loop.item import ScoreError
from verl_omni.reward_loop.threads import HangingError

MAX_CANCELS = 5
"""How often what is given up is cancelled."""
PATIENCE_S = 1.0
"""Seconds between two of them: a coroutine may have something to clean up."""


class Tasks:
    """Runs awaitables. Belongs to one event loop."""

    def __init__(self) -> None:
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, awaitable: Awaitable[Any], limit_s: float | None) -> Any:
        """What `awaitable` gives or raises; SystemExit as :class:`ScoreError`.

        Raises :class:`HangingError` if it takes more than `limit_s` seconds (None: no limit). It is given up then, and
        also if this call is cancelled.
        """
        task = asyncio.create_task(_outcome(awaitable))
        task.add_done_callback(_retrieve)
        try:
            await asyncio.wait({task}, timeout=limit_s)
        finally:
            if not task.done():
                self._give_up(task)
        if not task.done():
            raise HangingError(f"no score within reward.timeout_s={limit_s:g}")
        return task.result()

    async def close(self) -> None:
        """Wait until what was given up has ended or been cancelled often enough, a few seconds."""
        if self._ending:
            await asyncio.wait(self._ending)

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        ending = asyncio.create_task(self._end(task))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end(self, task: asyncio.Task[Any]) -> None:
        for _ in range(MAX_CANCELS):
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
            if done:
                return


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except SystemExit as error:  # out of a task it would end the event loop
        raise ScoreError(f"SystemExit: {error}") from error


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Else asyncio logs an error that comes after the task was given up as never retrieved."""
    if not task.cancelled():
        task.exception()
