"""Requests that end before their time, or meet a change of the policy: the others stay as they were."""

import asyncio

import pytest
import torch

from tests.workers.engines import LONG, collect, same, solo
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutError

pytestmark = pytest.mark.engine


def test_an_abort_ends_one_request_and_leaves_the_engine_usable(engine, run, ask, progress):
    first, aborted, third, late = requests = [ask(str(i), seed=i, **LONG) for i in range(4)]

    async def scenario():
        task = await progress.under_way(collect(engine, requests[:3]), 3)
        await engine.abort(["1", "unknown"])
        await progress.forward(2, task)  # request-level, the wave ends first
        joined = asyncio.create_task(engine.generate(late))
        return {**await task, late.request_id: await joined}, await solo(engine, [first, third, late])

    items, alone = run(scenario())
    error = items[aborted.request_id]
    assert isinstance(error, RolloutError) and error.message == "aborted" and error.request_id == "1"
    assert all(same(items[sample.request_id], sample) for sample in alone)


def test_cancelling_the_caller_aborts_the_request(engine, kind, run, ask, progress):
    requests = [ask(str(i), seed=i, **LONG) for i in range(2)]

    async def scenario():
        others = await progress.under_way(collect(engine, requests), 2)
        joins = kind.mode is RolloutMode.STEP_WISE  # otherwise it has a wave of its own
        task = await progress.under_way(engine.generate(ask("gone", seed=2, **LONG)), 3 if joins else 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await others, engine._gate.running, await solo(engine, [*requests, ask("gone")])

    items, running, (*alone, again) = run(scenario())
    assert running == 0 and again.request_id == "gone"
    assert all(same(items[sample.request_id], sample) for sample in alone)


def test_leaving_a_burst_early_aborts_the_rest(engine, run, ask, progress):
    stays = ask("stays", seed=9, **LONG)

    async def scenario():
        bystander = await progress.under_way(engine.generate(stays), 1)
        items = engine.generate_all([ask("short"), *(ask(str(i), **LONG) for i in range(2))])
        await anext(items)
        await items.aclose()
        sample = await bystander
        return engine._gate.running, sample, await engine.generate(stays)

    running, sample, alone = run(scenario())
    assert running == 0 and same(sample, alone)


def test_a_policy_that_arrives_in_mid_flight_waits(engine, run, ask, progress, loras):
    async def scenario():
        alone = await engine.generate(ask("alone", **LONG))
        version = engine.policy_version
        task = await progress.under_way(engine.generate(ask("a", **LONG)), 1)
        change = asyncio.create_task(engine.load_lora(loras[0]))
        while not engine._gate._changes:
            await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(ask("late", **LONG)))
        running, late = await asyncio.gather(task, late)
        await change
        direct = await engine.generate(ask("direct", **LONG))
        await engine.remove_lora()
        return alone, running, late, direct, version

    alone, running, late, direct, version = run(scenario())
    assert torch.equal(running.trajectory_latents, alone.trajectory_latents) and running.policy_version == version
    assert torch.equal(late.trajectory_latents, direct.trajectory_latents) and late.policy_version == version + 1
    assert not same(running, late, 1e-3)
