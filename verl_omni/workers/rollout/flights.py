"""Requests in flight: each ends with its sample or a :class:`RolloutError`, by itself or because it was ended."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

Burst = tuple[str, int]
"""Id and size of a burst, see ``engine_backend``."""
Trajectory = Callable[[RolloutRequest, Burst | None], Coroutine[Any, Any, RolloutSample]]
"""Makes the sample of a request. Raises :class:`RolloutError`; when cancelled, it ends the request in the engine."""
Settling = asyncio.Task[RolloutSample | RolloutError]
"""A request of a burst on its way to what is yielded for it."""


@dataclass
class _Flight:
    task: asyncio.Task[RolloutSample]
    ended: str | None = None
    """Why we ended it ourselves."""


class Flights:
    """The requests that `trajectory` is making samples of, by id."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self._flights: dict[str, _Flight] = {}

    async def fly(self, request: RolloutRequest, burst: Burst | None = None) -> RolloutSample:
        """One request to its end. Raises :class:`RolloutError`. Cancelling the awaiting task ends the request."""
        request_id = request.request_id
        if request_id in self._flights:
            raise RolloutError(request_id, "a request of this id is in flight; give each its own")
        flight = _Flight(asyncio.create_task(self._trajectory(request, burst)))
        self._flights[request_id] = flight
        try:
            return await flight.task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if flight.ended is None or (current is not None and current.cancelling()):
                raise
            raise RolloutError(request_id, flight.ended) from None
        finally:
            del self._flights[request_id]

    async def fly_all(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        """All at once, as one burst; yields each as it ends, a failed one as its error. Leaving it ends the rest."""
        async with aclosing(self.fly_ready(requests)) as results:
            async for ready in results:
                for result in ready:
                    yield result

    async def fly_ready(
        self, requests: Sequence[RolloutRequest]
    ) -> AsyncGenerator[list[RolloutSample | RolloutError], None]:
        """As :meth:`fly_all`, but yields together all that ended since the last time."""
        fresh = {request.request_id for request in requests} - self._flights.keys()
        burst = (uuid.uuid4().hex, len(fresh))
        # The engine's queue is first come, first served, and a batch ends where the image size changes. Nothing has
        # checked the sizes yet, so they may not even be hashable.
        by_size: dict[tuple[int | None, ...], list[RolloutRequest]] = {}
        for request in requests:
            size = tuple(edge if isinstance(edge, int) else None for edge in (request.height, request.width))
            by_size.setdefault(size, []).append(request)
        ordered = [request for group in by_size.values() for request in group]
        ended: asyncio.Queue[Settling] = asyncio.Queue()
        flying = {self._start(request, burst, ended) for request in ordered}

        async def ready() -> list[RolloutSample | RolloutError]:
            tasks = [await ended.get()]
            while not ended.empty():
                tasks.append(ended.get_nowait())
            flying.difference_update(tasks)  # which hold the samples
            return [task.result() for task in tasks]

        try:
            while flying:
                yield await ready()
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    async def end(self, reason: str, request_ids: Iterable[str] | None = None, *, timeout: float | None = None) -> None:
        """End these requests (None: all) with RolloutError(`reason`), and wait, `timeout` seconds at most.

        Ids that are not in flight are left alone.
        """
        ids = list(self._flights) if request_ids is None else request_ids
        flights = [self._flights[request_id] for request_id in ids if request_id in self._flights]
        for flight in flights:
            if flight.ended is None:
                flight.ended = reason
                flight.task.cancel()
        if flights:
            await asyncio.wait([flight.task for flight in flights], timeout=timeout)

    def _start(self, request: RolloutRequest, burst: Burst, ended: asyncio.Queue[Settling]) -> Settling:
        task = asyncio.create_task(self._settle(request, burst))
        task.add_done_callback(ended.put_nowait)
        return task

    async def _settle(self, request: RolloutRequest, burst: Burst) -> RolloutSample | RolloutError:
        try:
            return await self.fly(request, burst)
        except RolloutError as error:
            return error
