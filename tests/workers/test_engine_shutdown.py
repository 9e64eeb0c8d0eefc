"""How an engine ends. The last tests of a kind: an engine that they end would have to be started again."""

import asyncio
import multiprocessing

import pytest

from tests.workers.engines import BATCHED, LONG, collect
from verl_omni.workers.rollout.request import RolloutError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", [kind for kind in BATCHED if kind.executor == "mp"], indirect=True, ids=str)
def test_a_dead_worker_is_told_and_not_waited_for(engine, run, ask, progress):
    async def scenario():
        (worker,) = (child for child in multiprocessing.active_children() if "DiffusionWorker" in child.name)
        requests = [ask(str(i), num_inference_steps=1000) for i in range(2)]
        task = await progress.under_way(collect(engine, requests), 2)
        worker.kill()
        died = await task
        late = await asyncio.gather(engine.generate(ask("late")), return_exceptions=True)
        with pytest.raises(RolloutError):
            await engine.stats()
        await engine.close()
        return [*died.values(), *late]

    for error in run(scenario()):
        assert isinstance(error, RolloutError) and "died" in error.message


@pytest.mark.parametrize("kind", [kind for kind in BATCHED if kind.executor == "uni"], indirect=True, ids=str)
def test_closing_ends_what_is_in_flight(engine, run, ask, progress):
    async def scenario():
        task = await progress.under_way(collect(engine, [ask(str(i), **LONG) for i in range(2)]), 2)
        await engine.close()
        await engine.close()
        with pytest.raises(RolloutError, match="closed"):
            await engine.generate(ask("late"))
        return await task

    for error in run(scenario()).values():
        assert isinstance(error, RolloutError) and error.message == "the engine was closed"
