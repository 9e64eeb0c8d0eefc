"""Keeps trajectories and policy changes apart: a trajectory has one policy.

Many trajectories run at a time, or one change does. A change waits until those in flight have finished; while it waits
or runs, new trajectories wait too, so a steady stream of them can't hold it off. Changes run in the order they came.
The version counts the changes that succeeded, unless a change brings a number of its own; a failed one leaves it, as it
leaves the policy. Pure: no engine, no clock; everything happens on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class PolicyGate:
    """A readers-writer gate, fair to the writer, with a version number."""

    def __init__(self) -> None:
        self.version = 0
        """Number of policy changes that have succeeded, or what the last of them was called."""
        self._running = 0
        self._changes: deque[object] = deque()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def running(self) -> int:
        """Trajectories in flight."""
        return self._running

    @asynccontextmanager
    async def trajectory(self) -> AsyncIterator[int]:
        """Enter as one trajectory; gives the version of the policy that makes it."""
        while self._changes:
            await self._next_event()
        self._running += 1
        try:
            yield self.version
        finally:
            self._running -= 1
            self._notify()

    @asynccontextmanager
    async def change(self, *, counts: bool = True, version: int | None = None) -> AsyncIterator[None]:
        """Enter alone. If the body raised nothing, the version is `version` then, or one more if `counts`."""
        ticket = object()
        self._changes.append(ticket)
        try:
            while self._running or self._changes[0] is not ticket:
                await self._next_event()
            yield
            self.version = self.version + counts if version is None else version
        finally:
            self._changes.remove(ticket)
            self._notify()

    async def carry_out(
        self, change: Callable[[], Coroutine[Any, Any, T]], *, counts: bool = True, version: int | None = None
    ) -> T:
        """Enter alone and run `change`; returns what it returns. `counts` and `version` as in :meth:`change`.

        Once begun, it runs to its end: whoever is cancelled meanwhile waits for that and raises CancelledError then.
        Otherwise a policy that has changed would keep its old version, or a worker would sleep that counts as awake.
        """
        cancelled: asyncio.CancelledError | None = None
        async with self.change(counts=counts, version=version):
            task = asyncio.create_task(change())
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled is not None and (failure := task.exception()) is not None:
                raise cancelled from failure
            result = task.result()
        if cancelled is not None:
            raise cancelled
        return result

    async def _next_event(self) -> None:
        event = asyncio.get_running_loop().create_future()
        self._waiting.append(event)
        await event

    def _notify(self) -> None:
        if self._running and self._changes:
            return  # nobody may enter yet
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            if not event.done():
                event.set_result(None)
