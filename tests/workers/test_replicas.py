"""Rollout servers under Ray: they give what one engine gives, take the trainer's policies, and die alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.engines import BATCHED, CAP, FORWARDS, LONG, Kind, collect, same
from tests.workers.policies import write_lora
from tests.workers.processes import engine_worker, runs, server_process
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.handle import Placement
from verl_omni.workers.rollout.replicas import Recovery, RolloutReplicas
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.server import ServerSettings
from verl_omni.workers.rollout.wire import pack

pytestmark = pytest.mark.engine

FIRST, SECOND = (f"vllm_omni_server_{i}_0" for i in range(2))
KIND = next(kind for kind in BATCHED if kind.family == "sd3")
Groups = Sequence[Sequence[RolloutRequest]]
Results = dict[str, RolloutSample | RolloutError]


@pytest.fixture(scope="module")
def kind() -> Kind:
    return KIND


@pytest.fixture(scope="module")
def settings(tiny_sd3) -> ServerSettings:
    return ServerSettings(
        model_path=str(tiny_sd3),
        plan=KIND.plan,
        adapter="tests.workers.telling_adapters.TellingSD3",
        dtype="float32",
        engine_kwargs={"distributed_executor_backend": "mp"},
    )


@pytest.fixture(scope="module")
def started(ray_session, settings, progress) -> Iterator[tuple[asyncio.Runner, RolloutReplicas, list[str]]]:
    """Two servers, their event loop, and what was logged when they started."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("verl_omni")
    log.addHandler(handler)
    level, _ = log.level, log.setLevel(logging.INFO)
    environment = {FORWARDS: str(progress._path)}
    with asyncio.Runner() as runner:
        replicas = runner.run(RolloutReplicas.start(settings, [Placement()] * 2, env_vars=environment))
        log.removeHandler(handler)
        log.setLevel(level)
        yield runner, replicas, lines
        runner.run(replicas.close())


@pytest.fixture
def replicas(started) -> RolloutReplicas:
    return started[1]


@pytest.fixture
def run(started) -> Callable:
    """Run a scenario of coroutines on the servers' loop."""
    return started[0].run


@pytest.fixture(scope="module")
def groups() -> Groups:
    return [[KIND.ask(f"{g}-{i}", seed=10 * g + i, prompt=f"circle {g}") for i in range(CAP)] for g in range(4)]


@pytest.fixture(scope="module")
def alone(engines, groups, adapters) -> tuple[Results, Results]:
    """What one engine in this process gives, without and with the first LoRA."""

    async def scenario(engine):
        requests = [request for group in groups for request in group]
        base = await collect(engine, requests)
        await engine.load_lora(adapters["sd3"][0], scale=0.5)
        with_lora = await collect(engine, requests)
        await engine.remove_lora()
        return base, with_lora

    return engines.runner.run(scenario(engines.take(KIND)))


async def gather(replicas: RolloutReplicas, groups: Groups) -> Results:
    """The outcome of `groups` by request id."""
    results = [result async for result in replicas.generate_groups(groups)]
    assert len(results) == sum(map(len, groups))
    return {str(result.request_id): result for result in results}


def all_same(results: Results, others: Results) -> bool:
    return results.keys() == others.keys() and all(same(results[name], others[name]) for name in results)


def in_memory(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("changes", "placement", "error", "message"),
    [
        ({"external_lib": "no_such_module"}, Placement(), ConfigError, "external_lib='no_such_module' cannot be"),
        ({}, Placement(num_cpus=1000), TimeoutError, "server_0_0 has no process yet, as it needs 1000 CPU"),
    ],
)
def test_a_start_that_fails_says_why(ray_session, settings, changes, placement, error, message):
    timeout_s = 0.5 if error is TimeoutError else 600
    with pytest.raises(error, match=message):
        asyncio.run(
            RolloutReplicas.start(dataclasses.replace(settings, **changes), [placement], start_timeout_s=timeout_s)
        )


def test_the_plan_is_logged_once_a_server(started):
    lines = [line for line in started[2] if "rollout plan" in line]
    assert lines == [f"vllm_omni_server_{i}_0: {KIND.plan.log_line()}" for i in range(2)]


def test_two_servers_give_what_one_engine_gives(replicas, run, groups, alone):
    async def scenario():
        await replicas.stats(reset=True)
        results = await gather(replicas, groups)
        return results, await replicas.stats(reset=True), await replicas.stats(), await replicas.policy_versions()

    results, stats, after, versions = run(scenario())
    assert all_same(results, alone[0])
    assert all(torch.equal(results[name].images, alone[0][name].images) for name in results)
    assert stats.batch_sizes == {CAP: 4 * KIND.ask("any").num_inference_steps}  # every batch was full
    assert stats.encodes_computed == 4 + 2  # each prompt on one server, the negative one on both
    assert after == RolloutStats()
    assert versions == {"vllm_omni_server_0_0": 0, "vllm_omni_server_1_0": 0}
    assert {sample.policy_version for sample in results.values()} == {0}


def test_a_bad_request_fails_alone(replicas, run, groups, alone):
    bad = [KIND.ask("bad", noise_level=-1.0), KIND.ask("odd", num_inference_steps="many")]
    results = run(gather(replicas, [[*groups[0], bad[0]], [bad[1], *groups[1]]]))
    assert replicas.living == ["vllm_omni_server_0_0", "vllm_omni_server_1_0"]
    for name in ("bad", "odd"):
        error = results.pop(name)
        assert isinstance(error, RolloutError) and error.request_id == name
    assert all(same(results[name], alone[0][name]) for name in results) and len(results) == 2 * CAP


def test_leaving_early_aborts_the_rest(replicas, run, groups, alone):
    long = [[KIND.ask(f"long {g}", num_inference_steps=1000)] for g in range(2)]

    async def scenario():
        async with aclosing(replicas.generate_groups([groups[0], *long])) as results:
            first = await anext(results)
        await replicas.sleep()  # waits for what is in flight
        await replicas.wake_up()
        return first, await replicas.stats(reset=True), await gather(replicas, groups[:1])

    run(replicas.stats(reset=True))
    first, stats, again = run(scenario())
    assert isinstance(first, RolloutSample) and stats.batch_sizes.get(1, 0) < 1000
    assert all(same(again[name], alone[0][name]) for name in again)


def test_all_requests_can_be_aborted_while_they_run(replicas, run, progress):
    async def scenario():
        task = await progress.under_way(gather(replicas, [[KIND.ask("a", num_inference_steps=1000)]]), 1)
        alive = await replicas.alive()
        await replicas.abort_all_requests()
        return alive, await task

    alive, results = run(scenario())
    assert set(alive.values()) == {True}
    assert isinstance(results["a"], RolloutError) and results["a"].message == "aborted"


def test_sleep_keeps_the_policy_and_says_so_meanwhile(replicas, run, groups):
    async def scenario():
        before = await gather(replicas, groups[:1])
        await replicas.sleep()
        asleep = await gather(replicas, groups[:1])
        await replicas.wake_up()
        return before, asleep, await gather(replicas, groups[:1])

    before, asleep, after = run(scenario())
    assert all(isinstance(error, RolloutError) and "wake_up" in error.message for error in asleep.values())
    for name, sample in before.items():
        assert torch.equal(sample.trajectory_latents, after[name].trajectory_latents)


def test_cleared_prompt_embeddings_are_computed_again(replicas, run, groups):
    async def scenario():
        await gather(replicas, groups[:1])
        await replicas.clear_kv_cache()
        await replicas.stats(reset=True)
        await gather(replicas, groups[:1])
        return await replicas.stats()

    assert run(scenario()).encodes_computed == 2  # the prompt and the negative one


def test_a_lora_and_weights_come_with_the_trainers_version(replicas, run, groups, alone, adapters, checkpoints):
    import ray

    original = {f"transformer.{name}": tensor for name, tensor in checkpoints["sd3"].items()}
    changed = {name: tensor * 1.1 for name, tensor in original.items()}
    names = list(original)

    async def scenario():
        await replicas.sync("lora", 40, in_memory(adapters["sd3"][0]), scale=0.5)
        with_lora = await gather(replicas, groups)
        await replicas.sync("weights", 41, changed)
        both = await gather(replicas, groups)
        halves = ({name: original[name] for name in half} for half in (names[::2], names[1::2]))
        await replicas.sync("weights", 57, [ray.put(pack(half)) for half in halves])
        return with_lora, both, await gather(replicas, groups)

    with_lora, both, back = run(scenario())
    for results, version in ((with_lora, 40), (both, 41), (back, 57)):
        assert {sample.policy_version for sample in results.values()} == {version}
    assert all_same(with_lora, alone[1]) and all_same(back, alone[1])
    assert not any(same(sample, both[name], 1e-3) for name, sample in with_lora.items())


def test_a_policy_that_is_refused_leaves_the_old_one_and_says_so(
    replicas, run, groups, adapters, checkpoints, tmp_path
):
    weights = {f"transformer.{name}": tensor * 2 for name, tensor in checkpoints["sd3"].items()}
    name = next(name for name in weights if name.endswith("to_q.weight"))
    cut = {name: weight[:, :-1] if weight.ndim == 2 else weight for name, weight in checkpoints["sd3"].items()}
    config, tensors = in_memory(adapters["sd3"][1])
    bad = [
        ("lora", in_memory(write_lora(tmp_path / "cut", cut, 1)), "does not fit"),
        ("lora", ({**config, "rank_pattern": {"to_q": 2}}, tensors), "rank_pattern"),
        ("weights", weights | {name: weights[name][:-1]}, name),
        ("weights", {name: weights[name]}, "no weight"),
    ]

    async def scenario():
        old, versions = await gather(replicas, groups[:1]), await replicas.policy_versions()
        for kind, payload, message in bad:
            with pytest.raises(RolloutError, match="policy 99 was not taken, there the old one serves on") as raised:
                await replicas.sync(kind, 99, payload)
            assert message in str(raised.value) and "2 of 2 servers" in str(raised.value)
        with pytest.raises(ValueError, match="use one of lora, weights"):
            await replicas.sync("loras", 99, (config, tensors))
        return old, versions, await gather(replicas, groups[:1]), await replicas.policy_versions()

    old, versions, still, versions_after = run(scenario())
    assert versions == versions_after
    for name, sample in old.items():
        assert torch.equal(sample.trajectory_latents, still[name].trajectory_latents)


def test_killed_servers_are_replaced_and_nothing_is_lost(replicas, run, checkpoints, progress, caplog):
    weights = {f"transformer.{name}": tensor * 1.1 for name, tensor in checkpoints["sd3"].items()}
    stays, dies = [KIND.ask(f"stays {i}", **LONG) for i in range(3)], [KIND.ask("dies", **LONG)]

    async def scenario():
        await replicas.sync("weights", 58, weights)  # beside the LoRA
        undisturbed = await gather(replicas, [stays, dies])
        task = await progress.under_way(gather(replicas, [stays, dies]), 1)
        processes = {name: server_process(name) for name in (FIRST, SECOND)}
        workers = {name: engine_worker(pid) for name, pid in processes.items()}
        os.kill(workers[SECOND], signal.SIGKILL)
        one_left = await task, replicas.recovery(reset=True)
        task = await progress.under_way(gather(replicas, [stays]), 3)
        os.kill(processes[FIRST], signal.SIGKILL)
        none_left = await task, replicas.recovery()
        await replicas.sleep()  # waits for fresh servers
        await replicas.wake_up()
        killed = [*processes.values(), *workers.values()]
        after = await gather(replicas, [stays, dies])
        return undisturbed, one_left, none_left, after, killed, await replicas.policy_versions()

    replicas.recovery(reset=True)
    undisturbed, (results, recovery), (again, later), after, killed, versions = run(scenario())
    assert all_same(results, undisturbed) and all_same(after, undisturbed)
    assert recovery == Recovery(requests_retried=1)
    assert len(again) == later.requests_retried == 3
    assert all(same(again[name], undisturbed[name]) for name in again)
    assert {sample.policy_version for sample in (*results.values(), *again.values())} == {58}
    assert versions == {FIRST: 58, SECOND: 58}
    assert replicas.recovery().servers_restarted == 2
    assert not any(map(runs, killed))
    died = [message for message in caplog.messages if "died: " in message]
    assert [message.split()[0] for message in died] == [SECOND, FIRST]
    assert "requests run again: 1; a fresh server takes its place" in died[0]
    assert "its worker process has died" in died[1] and "common causes" not in died[1]
    assert len([message for message in caplog.messages if "serves again" in message]) == 2


def test_closed_servers_say_so(replicas, run):
    run(replicas.close())
    with pytest.raises(RolloutError, match="closed"):
        run(replicas.sleep())
