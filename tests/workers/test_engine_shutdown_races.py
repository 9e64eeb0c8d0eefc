"""Ends at a bad moment: an abort before its request, a call as the engine closes, a close in a long wave."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.workers.engines import BATCHED, LONG, LONG_STEPS, backend_of
from verl_omni.workers.rollout.request import RolloutError

pytestmark = [pytest.mark.engine, pytest.mark.parametrize("kind", BATCHED[:1], indirect=True, ids=str)]

MEET_S = 10.0
"""How long two threads of the engine may take to the point where a test has them meet."""


def test_an_abort_that_overtakes_its_request_ends_it_and_leaves_the_next_of_its_id(engine, run, ask, monkeypatch):
    backend = backend_of()
    check, abort, add = backend._check_and_start_background_loop, backend._abort_requests, backend._add_prepared_request
    coming, aborted, came = threading.Event(), threading.Event(), threading.Event()

    async def held_up():
        await check()
        coming.set()
        assert await asyncio.to_thread(aborted.wait, MEET_S)

    def aborting(request_ids):
        abort(request_ids)
        aborted.set()

    def coming_late(request):
        try:
            return add(request)
        finally:
            came.set()

    async def scenario():
        await engine.stats(reset=True)
        task = asyncio.create_task(engine.generate(ask("again", **LONG)))
        assert await asyncio.to_thread(coming.wait, MEET_S)
        await engine.abort()
        with pytest.raises(RolloutError, match="aborted"):
            await task
        assert await asyncio.to_thread(came.wait, MEET_S)
        await engine.generate(ask("again", **LONG))
        return await engine.stats()

    monkeypatch.setattr(backend, "_check_and_start_background_loop", held_up)
    monkeypatch.setattr(backend, "_abort_requests", aborting)
    monkeypatch.setattr(backend, "_add_prepared_request", coming_late)
    stats = run(scenario())
    assert stats.waves == 1 and stats.batch_sizes == {1: LONG_STEPS}


def test_a_call_that_comes_when_the_engine_has_taken_its_last_look_is_told(engine, run, ask, monkeypatch):
    backend = backend_of()
    submit, called = backend._submit_rpc, threading.Event()

    def held_up(*args):
        called.set()
        backend.worker_thread.join(MEET_S)
        return submit(*args)

    run(engine.generate(ask("first")))  # its thread starts with the first request
    monkeypatch.setattr(backend, "_submit_rpc", held_up)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(backend.collective_rpc, "rollout_stats", MEET_S, (False,))
        assert called.wait(MEET_S)
        run(engine.close())
        with pytest.raises(RuntimeError, match="closed"):
            answer.result()


def test_an_engine_that_is_closed_in_a_long_wave_gives_the_model_back_after_it(engine, run, ask, monkeypatch):
    backend = backend_of()
    execute, shutdown = backend.execute_fn, backend.executor.shutdown
    in_wave, wave_ends, given_back = threading.Event(), threading.Event(), threading.Event()

    def long_wave(scheduled):
        in_wave.set()
        assert wave_ends.wait(MEET_S)
        return execute(scheduled)

    def shutting_down():
        shutdown()
        given_back.set()

    async def scenario():
        task = asyncio.create_task(engine.generate(ask("long")))
        assert await asyncio.to_thread(in_wave.wait, MEET_S)
        join = backend.worker_thread.join
        monkeypatch.setattr(backend.worker_thread, "join", lambda timeout=None: None if timeout else join())
        await engine.close()
        backend.close()
        assert not given_back.is_set()
        with pytest.raises(RolloutError, match="closed"):
            await task

    monkeypatch.setattr(backend, "execute_fn", long_wave)
    monkeypatch.setattr(backend.executor, "shutdown", shutting_down)
    run(scenario())
    wave_ends.set()
    assert given_back.wait(MEET_S)
