"""Outputs that worker processes hand over by themselves, after they said that a batch is computed."""

import threading
from concurrent.futures import Future

import pytest
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.executor import multiproc_executor

from tests.workers.engines import BATCHED, backend_of, collect, held_outputs, same, solo
from verl_omni.workers.rollout.request import RolloutError

pytestmark = [pytest.mark.engine, pytest.mark.parametrize("kind", BATCHED[2:], indirect=True, ids=str)]

MEET_S = 30.0
"""How long two threads of the engine may take to the point where a test has them meet."""


def test_an_output_that_is_unpacked_while_its_members_are_named_reaches_them(engine, run, ask, monkeypatch):
    requests = [ask(str(i), seed=i) for i in range(2)]
    executor = backend_of().executor
    unpack, collective_rpc = multiproc_executor.unpack_diffusion_output_shm, executor.collective_rpc
    unpacking, named = threading.Event(), threading.Event()

    class Members(dict):
        def __setitem__(self, batch_id, members):
            super().__setitem__(batch_id, members)
            named.set()

    def computed_and_unpacking(method, *args, **kwargs):
        result = collective_rpc(method, *args, **kwargs)
        assert method != "execute_model_batch" or unpacking.wait(MEET_S)
        return result

    def unpacked_once_named(output):
        unpacking.set()
        assert named.wait(MEET_S)
        unpack(output)

    monkeypatch.setenv("VLLM_OMNI_ASYNC_OUTPUT_TIMEOUT", str(MEET_S))
    alone = run(solo(engine, requests))
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_batch_split_map", Members())
        patch.setattr(executor, "collective_rpc", computed_and_unpacking)
        patch.setattr(multiproc_executor, "unpack_diffusion_output_shm", unpacked_once_named)
        items = run(collect(engine, requests))
    assert named.is_set() and all(same(items[sample.request_id], sample) for sample in alone)


def test_an_output_that_does_not_come_is_told(engine, run, ask, monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_ASYNC_OUTPUT_TIMEOUT", "0.01")
    executor = backend_of().executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "wait_output_ready", lambda output_id: Future())
        with pytest.raises(RolloutError, match=r"request 'late': .* output .* 0.01 s .*VLLM_OMNI_ASYNC_OUTPUT_TIMEOUT"):
            run(engine.generate(ask("late")))


@pytest.mark.parametrize("output_first", [True, False])
def test_an_output_whose_caller_goes_is_dropped(engine, run, output_first):
    executor = backend_of().executor
    members = {"batch/cancelled": "cancelled", "batch/aborted": "aborted"}

    async def scenario():
        if output_first:
            executor._deliver_batch_split(members, None, "the test says so")
        waiting, promise = executor.wait_output_ready("batch/cancelled"), DiffusionOutput()
        executor.promised("batch/aborted", promise)
        waiting.cancel()
        del promise
        if not output_first:
            executor._deliver_batch_split(members, None, "the test says so")
        for _ in range(2):  # with the second answer of a worker, what came before the first is settled
            await engine.stats()

    run(scenario())
    assert held_outputs() == 0
