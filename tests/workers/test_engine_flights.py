"""Requests that end before their time, or meet a change of the policy: the others stay as they were."""

import asyncio
import gc
import itertools

import psutil
import pytest
import torch

from tests.workers.engines import BATCHED, CAP, LONG, MERGED, backend_of, collect, held_outputs, same, solo
from verl_omni.pipelines.rows import Rollout, RowBatch
from verl_omni.testing.soak.checks import check_memory
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutError, RolloutSample

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


BRIEF = {"height": 32, "width": 32, "num_inference_steps": 3, "scale": 1.0}
"""Of a request of which there are many."""
ROUNDS = 2
"""Of bursts: 1428 aborts if no request were done before it is aborted, of which at least 1000 are to succeed."""


def held(engine) -> dict[str, int]:
    """How much each registry of ours holds, with the engine in this process."""
    queue, gate, flights = backend_of().scheduler, engine._gate, engine._flights._flights
    return {
        "flights": len(flights),
        "trajectories": gate.running + len(gate._waiting) + len(gate._changes),
        "queue": len(queue._waiting) + len(queue._arrivals) + len(queue._order._overtaken),
        "bursts": sum(queue._bursts._missing.values()),
        "outputs": held_outputs(),
        "requests": len(queue._request_states),
        "rollouts": sum(isinstance(o, (Rollout, RowBatch)) for o in gc.get_objects()),
        "tasks": len(asyncio.all_tasks()),
    }


async def ended_at(engine, progress, requests, forwards, ids):
    """Outcomes of a burst of which `ids` (None: all) are aborted so many forwards after it came."""
    task = asyncio.create_task(collect(engine, requests))
    while len(engine._flights._flights) < len(requests):
        await asyncio.sleep(0)
    for _ in range(forwards):
        await progress.forward(CAP, task)
    await engine.abort(ids)
    return await task


@pytest.mark.parametrize("kind", BATCHED, indirect=True, ids=str)
def test_a_thousand_aborts_at_every_stage_leave_nothing_behind(engine, run, ask, progress):
    many = [ask(str(i), **BRIEF) for i in range(15 * CAP)]
    names = [request.request_id for request in many]
    kinds = [(many[: CAP + 1], names[:1]), (many, names[1:-1]), (many, None)]
    stages = range(2 * BRIEF["num_inference_steps"])  # sent, first step, later ones, and the same of the second batch

    async def scenario():
        want = await engine.generate(ask("alone", **BRIEF))
        await engine.release_caches()
        gc.collect()
        before, aborted, memory = held(engine), 0, []
        for _, stage, (requests, ids) in itertools.product(range(ROUNDS), stages, kinds):
            items = await ended_at(engine, progress, requests, stage, ids)
            assert items.keys() == {request.request_id for request in requests}
            errors = {name: item for name, item in items.items() if isinstance(item, RolloutError)}
            asked = {*(names if ids is None else ids)}
            assert errors.keys() <= asked and (stage or errors.keys() == asked)  # sent just now, none can be done
            assert all(error.message == "aborted" for error in errors.values())
            assert all(same(item, want) for item in items.values() if isinstance(item, RolloutSample))
            aborted += len(errors)
            memory.append(psutil.Process().memory_info().rss / 2**20)
        assert aborted >= 1000
        again = await engine.generate(ask("alone", **BRIEF))
        await engine.release_caches()
        gc.collect()
        for _ in range(2):  # with the second answer of a worker, what came before the first is settled
            await engine.stats()
        return want, again, before, held(engine), memory

    want, again, before, after, memory = run(scenario())
    assert torch.equal(want.trajectory_latents, again.trajectory_latents)
    nothing = dict.fromkeys(("flights", "trajectories", "queue", "bursts", "outputs", "requests"), 0)
    assert after == before == before | nothing
    assert list(check_memory("the engine", memory)) == []


@pytest.mark.parametrize("kind", [*BATCHED, *MERGED], indirect=True, ids=str)
@pytest.mark.parametrize("what", ["lora", "weights"])
def test_a_policy_that_arrives_in_mid_flight_waits(engine, run, ask, progress, loras, transformer, what):
    original = {f"transformer.{name}": tensor for name, tensor in transformer.items()}
    changed = {name: tensor * 1.1 for name, tensor in original.items()}

    async def scenario():
        alone = await engine.generate(ask("alone", **LONG))
        version = engine.policy_version
        task = await progress.under_way(engine.generate(ask("a", **LONG)), 1)
        coming = engine.load_lora(loras[0]) if what == "lora" else engine.update_weights(changed)
        change = asyncio.create_task(coming)
        while not engine._gate._changes:
            await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(ask("late", **LONG)))
        running, late = await asyncio.gather(task, late)
        await change
        direct = await engine.generate(ask("direct", **LONG))
        await (engine.remove_lora() if what == "lora" else engine.update_weights(original))
        return alone, running, late, direct, version

    alone, running, late, direct, version = run(scenario())
    assert torch.equal(running.trajectory_latents, alone.trajectory_latents) and running.policy_version == version
    assert torch.equal(late.trajectory_latents, direct.trajectory_latents) and late.policy_version == version + 1
    assert not same(running, late, 1e-3)


def test_a_sleep_in_mid_flight_waits_and_what_comes_meanwhile_is_told_of_it(engine, run, ask, progress):
    async def scenario():
        alone = await engine.generate(ask("alone", **LONG))
        task = await progress.under_way(engine.generate(ask("a", **LONG)), 1)
        sleep = asyncio.create_task(engine.sleep())
        while not engine._gate._changes:
            await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="asleep; call wake_up"):
            await engine.generate(ask("late"))
        await sleep
        await engine.wake_up()
        return alone, await task, await engine.generate(ask("awake", **LONG))

    alone, running, awake = run(scenario())
    assert torch.equal(running.trajectory_latents, alone.trajectory_latents)
    assert torch.equal(awake.trajectory_latents, alone.trajectory_latents)
