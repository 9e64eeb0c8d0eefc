"""Deaths, aborts and ends that meet at the worst moment."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import pytest
import ray

from tests.workers.fake_servers import FakeServer, Script
from tests.workers.test_fleet import FIRST, LORA, SECOND, all_up, gather, versions
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.rollout import fleet, handle
from verl_omni.workers.rollout import replicas as replicas_module
from verl_omni.workers.rollout.handle import ServerDied, ServerHandle, tells_death
from verl_omni.workers.rollout.replicas import RolloutReplicas
from verl_omni.workers.rollout.request import RolloutError

TURNS = 60
"""Of the event loop: more than the work of :func:`steps` takes."""


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def start(script, monkeypatch) -> Callable:
    return lambda servers, **timeouts: script.start(monkeypatch, servers, **timeouts)


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def steps(replicas: RolloutReplicas) -> None:
    """Two training steps, the second with another policy."""
    await replicas.sync("weights", 1, ["w"])
    assert versions(await gather(replicas, "abcd", "wxyz")) == {1}
    await replicas.stats(reset=True)
    await all_up(replicas)
    await replicas.sync("lora", 2, LORA)
    assert versions(await gather(replicas, "abcd", "wxyz")) == {2}


@pytest.mark.parametrize("dying", [[1], [0, 1]], ids=["one", "both"])
@pytest.mark.parametrize("memory", [False, True], ids=["", "memory"])
async def test_whenever_servers_die_each_request_is_served_once(script, start, monkeypatch, caplog, dying, memory):
    """Some turns later the fresh one dies too. Where the memory ran out, Ray's error is none of an actor."""
    monkeypatch.setattr(FakeServer, "_stats", lambda server, reset: RolloutStats(), raising=False)
    if memory:
        monkeypatch.setattr(FakeServer, "_check", _check_memory)
    caplog.set_level(logging.CRITICAL)
    for turn, later in itertools.product(range(TURNS), (0, 3, 12)):
        script.made.clear()
        async with await start(2) as replicas:
            work = asyncio.create_task(steps(replicas))
            await turns(turn)
            for place in dying:
                script.made[place].die()
            await turns(later)
            if len(script.made) > 2:
                script.made[-1].die()
            await asyncio.wait_for(work, 30)


def _check_memory(server: FakeServer) -> None:
    if server._end.is_set():
        raise RolloutError(None, f"{server.name}: the task was killed, as memory ran low")


def test_rays_errors_that_tell_a_death():
    errors = ray.exceptions
    died = (errors.ActorDiedError(), errors.OutOfMemoryError("low"), errors.NodeDiedError("gone"), ServerDied(None, ""))
    assert all(map(tells_death, died))
    assert not any(map(tells_death, (errors.GetTimeoutError(), RolloutError(None, "bad"), ValueError())))


async def test_what_ends_the_serving_ends_the_waiting(start, monkeypatch):
    async with await start(1) as replicas:
        monkeypatch.setattr(replicas._fleet.spread, "deal", lambda costs: costs["none"])
        with pytest.raises(TypeError):
            await asyncio.wait_for(gather(replicas, "a"), 30)


async def test_an_interrupt_does_not_wait_for_a_server_that_hangs(script, start, monkeypatch):
    class Hangs:
        def __aiter__(self):
            return self

        async def __anext__(self):
            await asyncio.get_running_loop().create_future()

    class Actor:
        class generate_group:
            remote = staticmethod(lambda requests: Hangs())

    monkeypatch.setattr(handle, "ABORT_GRACE_S", 0.01)
    monkeypatch.setattr(ray, "cancel", lambda stream: None)
    monkeypatch.setattr(FakeServer, "generate", ServerHandle.generate)
    async with await start(1) as replicas:
        script.made[0]._actor = Actor
        work = asyncio.create_task(gather(replicas, "ab"))
        await turns(20)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(work, 30)


async def test_closing_does_not_wait_for_a_server_that_hangs_in_the_start_of_another(script, start, monkeypatch):
    monkeypatch.setattr(replicas_module, "CLOSE_GRACE_S", 0.01)
    replicas = await start(2, sync_timeout_s=3600)
    await replicas.sync("weights", 1, ["w"])
    script.stuck = {"set_weights"}
    script.made[1].die()
    await until(lambda: len(script.made) == 3 and "set_weights" in script.made[2].methods())
    script.stuck = {"drop_weights"}  # asked of the first
    await asyncio.wait_for(replicas.close(), 30)
    assert all(server._end.is_set() for server in script.made)


async def test_a_server_that_cannot_be_made_is_tried_again(script, start, monkeypatch, caplog):
    async with await start(2) as replicas:
        tries = iter([True])

        def create(*arguments):
            if next(tries, False):
                raise ValueError("the name is taken")
            return script.create(*arguments)

        monkeypatch.setattr(fleet.ServerHandle, "create", create)
        script.made[1].die()
        await until(lambda: len(script.made) == 3)
        await all_up(replicas)
        assert replicas.living == [FIRST, SECOND]
    assert f"{SECOND} did not start again, attempt 1 of 2: the name is taken" in caplog.messages


async def test_a_dead_server_that_cannot_be_killed_gets_nothing_any_more(script, start, monkeypatch):
    async with await start(2) as replicas:

        def kill() -> None:
            raise RuntimeError("Ray does not answer")

        monkeypatch.setattr(script.made[1], "kill", kill)
        script.made[1]._is_alive = False
        with pytest.raises(RuntimeError, match="Ray does not answer"):
            await replicas.alive()
        assert replicas.living == [FIRST]


async def test_an_abort_of_which_a_server_dies_is_an_abort(script, start):
    async with await start(2) as replicas:
        script.stuck = {"x"}
        work = asyncio.create_task(gather(replicas, "ab", "xy"))
        await turns(20)
        script.made[1]._abort_all_requests = lambda: script.made[1].die()
        await replicas.abort_all_requests()
        results = await work
        assert all(isinstance(results[name], RolloutError) and results[name].aborted for name in "xy")
