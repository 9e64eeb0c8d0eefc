"""Requests in flight, without an engine: the order in which their samples come, and who holds them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest

from verl_omni.workers.rollout.flights import Flights
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest


class Sample(SimpleNamespace):
    __hash__ = object.__hash__


class Landing:
    """Lets the requests end when it is told to."""

    def __init__(self, names: str) -> None:
        self.cancelled: list[str] = []
        self._may_end = {name: asyncio.Event() for name in names}

    async def trajectory(self, request: RolloutRequest, burst: object) -> Sample:
        try:
            await self._may_end[request.request_id].wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        if request.prompt == "bad":
            raise RolloutError(request.request_id, "bad")
        return Sample(request_id=request.request_id)

    async def end(self, names: str) -> None:
        for name in names:
            self._may_end[name].set()
        for _ in range(9):  # turns of the loop
            await asyncio.sleep(0)


def requests(names: str) -> list[RolloutRequest]:
    return [RolloutRequest(request_id=name, prompt="bad" if name == "x" else "a fox") for name in names]


def ids(results: list) -> list[str]:
    return [result.request_id for result in results]


async def test_what_ended_since_the_last_time_comes_together_in_the_order_in_which_it_ended():
    landing = Landing("abcxd")
    flying = Flights(landing.trajectory).fly_ready(requests("abcxd"))
    first = asyncio.ensure_future(anext(flying))
    await landing.end("c")
    await landing.end("a")
    await landing.end("x")
    results = await first + await anext(flying)
    assert ids(results) == ["c", "a", "x"] and isinstance(results[-1], RolloutError)
    await landing.end("db")
    assert ids(await anext(flying)) == ["d", "b"]
    with pytest.raises(StopAsyncIteration):
        await anext(flying)


async def test_samples_that_were_taken_are_held_by_nobody_else():
    async def consume() -> None:
        async for ready in Flights(landing.trajectory).fly_ready(requests("abcd")):
            taken.extend(map(weakref.ref, ready))
            del ready

    landing, taken = Landing("abcd"), []
    consumer = asyncio.create_task(consume())
    await landing.end("abc")
    gc.collect()
    assert [sample() for sample in taken] == [None] * 3
    await landing.end("d")
    await consumer


async def test_leaving_early_ends_what_still_flies():
    landing = Landing("abc")
    flights = Flights(landing.trajectory)
    flying = flights.fly_ready(requests("abc"))
    first = asyncio.ensure_future(anext(flying))
    await landing.end("b")
    assert ids(await first) == ["b"]
    await flying.aclose()
    assert sorted(landing.cancelled) == ["a", "c"] and not flights._flights
