"""Threads for functions that may never return.

Python cannot end a thread. A function that takes too long is given up: it goes on by itself, its thread ends with it,
and another thread takes its place. None of them keeps the process from ending, as a pool's threads do.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

MAX_HANGING = 32
"""Functions that may hang at a time. They keep memory, and perhaps a core each: beyond this no more are begun."""
FULL = f"{MAX_HANGING} calls hang already, and no more are begun; end the run, and find out why they do"
CLOSED = "the threads are closed"


class HangingError(TimeoutError):
    """A function has not returned in time."""


class Threads:
    """Runs functions in `count` threads at a time. Belongs to the event loop of its first call."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting: set[_Job] = set()
        self._hanging: set[_Job] = set()
        self._started = 0
        self._closed = False

    async def run(self, function: Callable[[], Any], limit_s: float | None) -> Any:
        """What `function` returns or raises; waits for its turn, which is not counted.

        Raises :class:`HangingError` if it takes more than `limit_s` seconds (None: no limit), or if `MAX_HANGING`
        functions hang; RuntimeError after :meth:`close`. One that is cancelled before its turn is not begun.
        """
        if self._closed:
            raise RuntimeError(CLOSED)
        if len(self._hanging) >= MAX_HANGING:
            raise HangingError(FULL)
        while self._started < self._count:
            self._start_thread()
        job = _Job(function, limit_s, self)
        self._waiting.add(job)
        self._jobs.put(job)
        try:
            return await job.result
        finally:
            self._waiting.discard(job)

    def close(self) -> None:
        """Begin nothing any more. What runs is not waited for."""
        self._closed = True
        self._refuse_waiting(RuntimeError, CLOSED)
        for _ in range(self._started + len(self._hanging)):
            self._jobs.put(None)

    def _start_thread(self) -> None:
        self._started += 1
        threading.Thread(target=_work, args=(self._jobs,), name="reward", daemon=True).start()

    def begun(self, job: _Job) -> None:
        """In the loop: the time of `job` runs."""
        self._waiting.discard(job)
        if job.limit_s is not None and not job.returned:
            job.timer = job.loop.call_later(job.limit_s, self._give_up, job)

    def ended(self, job: _Job, value: Any, error: BaseException | None) -> None:
        """In the loop: `job` has returned, in time or not."""
        if job.timer is not None:
            job.timer.cancel()
        self._hanging.discard(job)
        if not job.result.done():
            if error is None:
                job.result.set_result(value)
            else:
                job.result.set_exception(error)

    def _give_up(self, job: _Job) -> None:
        with job.lock:
            if job.returned:
                return
            job.given_up = True
        self._hanging.add(job)
        self._started -= 1
        if not job.result.done():
            job.result.set_exception(
                HangingError(
                    f"no score within reward.timeout_s={job.limit_s:g}; its thread cannot be ended and goes on, "
                    f"{len(self._hanging)} of at most {MAX_HANGING}"
                )
            )
        if len(self._hanging) < MAX_HANGING:
            self._start_thread()
            return
        self._refuse_waiting(HangingError, FULL)

    def _refuse_waiting(self, kind: type[Exception], reason: str) -> None:
        for job in self._waiting:
            if not job.result.done():
                job.result.set_exception(kind(reason))


class _Job:
    """One call: `result` and `timer` belong to the loop, the other fields to both sides, under `lock`."""

    def __init__(self, function: Callable[[], Any], limit_s: float | None, owner: Threads) -> None:
        self.function, self.limit_s, self.owner = function, limit_s, owner
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self.loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.lock = threading.Lock()
        self.returned = self.given_up = False

    def run(self) -> bool:
        """In a thread; whether that thread is still wanted."""
        if self.result.done():
            return True
        self._tell(self.owner.begun, self)
        value: Any = None
        error: BaseException | None = None
        try:
            value = self.function()
        except StopIteration:  # no future can hold it
            error = RuntimeError("StopIteration")
        except BaseException as raised:
            error = raised
        with self.lock:
            self.returned = True
            wanted = not self.given_up
        self._tell(self.owner.ended, self, value, error)
        return wanted

    def _tell(self, *call: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self.loop.call_soon_threadsafe(*call)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None and job.run():
        del job  # its image and its result are not kept while the thread waits
