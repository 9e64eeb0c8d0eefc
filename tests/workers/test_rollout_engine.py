"""The engine in each mode and executor: batching, policies, aborts, sleep, and what happens when it dies.

Only one engine lives in a process at a time, so each test runs under one mode after the other, with one engine a mode.
"""

import asyncio
import json
import multiprocessing
import pickle
from collections.abc import Iterator, Mapping

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.launch import engine_arguments
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

pytestmark = pytest.mark.engine

ADAPTER = "verl_omni.pipelines.qwen_image.rollout.QwenImageRollout"
MODES = [("uni", RolloutMode.REQUEST_LEVEL), ("uni", RolloutMode.STEP_WISE), ("mp", RolloutMode.REQUEST_LEVEL)]
CAP = 4
LONG = 40
"""Steps of a request that is still running when the test does something to it."""


def plan(mode: RolloutMode) -> RolloutPlan:
    return RolloutPlan(
        mode=mode, max_num_seqs=CAP, request_batch_max_wait_ms=0.0, rows_per_forward=None, reason="the test says so"
    )


def ask(name: str, **knobs) -> RolloutRequest:
    knobs = {
        "prompt_token_ids": list(range(5, 60)),
        "negative_prompt_token_ids": list(range(5, 50)),
        "height": 64,
        "width": 64,
        "num_inference_steps": 4,
        "true_cfg_scale": 4.0,
        "sde_window_size": 2,
        "sde_window_range": (0, 3),
        "seed": 7,
    } | knobs
    return RolloutRequest(request_id=name, **knobs)


def same(a: RolloutSample, b: RolloutSample, atol: float = 1e-5) -> bool:
    return torch.allclose(a.trajectory_latents, b.trajectory_latents, atol=atol, rtol=0)


def write_lora(folder, transformer: Mapping[str, torch.Tensor], seed: int, leaves=("to_q", "to_k", "to_v", "to_out.0")):
    """A PEFT adapter of rank 4 with random weights on these layers of the checkpoint's transformer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in transformer.items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and module.endswith(leaves):
            for half, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": sorted(leaves)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def transformer(tiny_qwen) -> dict[str, torch.Tensor]:
    """The checkpoint's transformer weights, without prefix."""
    (file,) = (tiny_qwen / "transformer").glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def loras(tmp_path_factory, transformer):
    """Two adapters that fit."""
    folder = tmp_path_factory.mktemp("loras")
    return [write_lora(folder / str(seed), transformer, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module", params=MODES, ids=lambda param: f"{param[0]}-{param[1].value}")
def live(request, runner, tiny_qwen) -> Iterator[tuple[RolloutEngine, str]]:
    executor, mode = request.param
    started = RolloutEngine.start(
        model_path=tiny_qwen, plan=plan(mode), adapter=ADAPTER, dtype="float32", executor=executor
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a worker process whose threads spin gets nowhere on a busy machine
        engine = runner.run(started)
    yield engine, executor
    runner.run(engine.close())


@pytest.fixture
def engine(live) -> RolloutEngine:
    return live[0]


@pytest.fixture
def run(runner):
    """Run a scenario of coroutines on the engine's loop."""
    return runner.run


async def collect(engine: RolloutEngine, requests) -> dict[str, RolloutSample | RolloutError]:
    return {item.request_id: item async for item in engine.generate_all(requests)}


async def submitted(engine: RolloutEngine, *requests: RolloutRequest) -> list[asyncio.Task[RolloutSample]]:
    """Tasks of requests that have passed the gate."""
    tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
    while engine._gate.running < len(tasks) and not any(task.done() for task in tasks):
        await asyncio.sleep(0)
    return tasks


def test_a_burst_is_one_wave_and_every_sample_is_complete(engine, run):
    async def scenario():
        await engine.stats(reset=True)
        samples = await collect(engine, [ask(str(i), seed=i) for i in range(CAP)])
        return samples, await engine.stats(reset=True)

    samples, stats = run(scenario())
    assert dict(stats.batch_sizes) == {CAP: 4} and stats.waves == 1
    assert stats.encodes_requested == 2 * CAP
    for i in range(CAP):
        sample = samples[str(i)]
        assert sample.images.shape == (1, 3, 64, 64) and sample.images.dtype == torch.uint8 and sample.latents is None
        assert sample.trajectory_latents.shape[:2] == (1, 3) and sample.trajectory_log_probs.shape == (1, 2)
        assert sample.trajectory_timesteps.shape == (1, 2) and sample.seed == i
        ((start, stop),) = sample.sde_windows
        assert stop - start == 2 and sample.prompt_embeddings["prompt_embeds"].ndim == 2


def test_a_sample_pickles_to_the_bytes_of_its_own_rows(engine, run):
    samples = run(collect(engine, [ask(str(i), seed=i, num_outputs_per_prompt=2) for i in range(CAP)]))
    for sample in samples.values():
        tensors = [value for value in vars(sample).values() if isinstance(value, torch.Tensor)]
        tensors += list(sample.prompt_embeddings.values())
        assert len(pickle.dumps(sample)) < sum(tensor.nbytes for tensor in tensors) + 500 * len(tensors)


def test_latents_instead_of_pixels(engine, run):
    sample = run(engine.generate(ask("latent", output_type="latent")))
    assert sample.images is None and sample.latents.dtype == torch.float32


def test_unlike_requests_share_one_wave(engine, run):
    unlike = [
        ask("plain"),
        ask("scale", true_cfg_scale=2.0),
        ask("no guidance", negative_prompt_token_ids=None),
        ask("two images", num_outputs_per_prompt=2),
    ]

    async def scenario():
        await engine.stats(reset=True)
        together = await collect(engine, unlike)
        stats = await engine.stats()
        return together, stats, [await engine.generate(one) for one in unlike]

    together, stats, alone = run(scenario())
    assert dict(stats.batch_sizes) == {5: 4} and stats.waves == 1
    assert all(same(together[sample.request_id], sample) for sample in alone)


def test_a_burst_of_two_sizes_batches_each(engine, run):
    async def scenario():
        await engine.stats(reset=True)
        samples = await collect(engine, [ask(str(i), width=(64, 32)[i % 2]) for i in range(CAP)])
        return samples, await engine.stats()

    samples, stats = run(scenario())
    assert dict(stats.batch_sizes) == {CAP // 2: 8} and stats.waves == 2
    assert [samples[str(i)].images.shape[-1] for i in range(CAP)] == [64, 32, 64, 32]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"height": 63}, "height"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"seed": "seven"}, "seed"),
        ({"prompt_token_ids": None}, "prompt"),
        ({"guidance_scale": "high"}, "guidance_scale must be a finite number"),
    ],
)
def test_a_bad_request_fails_alone(engine, run, knobs, message):
    requests = [ask("good", seed=1), ask("bad", **knobs), ask("other", seed=2)]
    items = run(collect(engine, requests))
    assert isinstance(items["good"], RolloutSample) and isinstance(items["other"], RolloutSample)
    assert isinstance(items["bad"], RolloutError)
    assert "request 'bad'" in str(items["bad"]) and message in items["bad"].message


def test_a_request_id_is_used_once_at_a_time(engine, run):
    async def scenario():
        twins = [item async for item in engine.generate_all([ask("twin"), ask("twin")])]
        return twins, await engine.generate(ask("twin"))

    twins, again = run(scenario())
    error, sample = sorted(twins, key=lambda item: isinstance(item, RolloutSample))
    assert isinstance(error, RolloutError) and "in flight" in error.message
    assert same(sample, again)


def test_an_abort_ends_one_request_and_leaves_the_engine_usable(engine, run):
    async def scenario():
        tasks = await submitted(engine, *(ask(str(i), seed=i, num_inference_steps=LONG) for i in range(3)))
        await engine.abort(["1", "unknown"])
        fourth = asyncio.create_task(engine.generate(ask("3", seed=3)))
        return await asyncio.gather(*tasks, fourth, return_exceptions=True)

    first, aborted, third, fourth = run(scenario())
    assert isinstance(aborted, RolloutError) and aborted.message == "aborted" and aborted.request_id == "1"
    assert all(isinstance(sample, RolloutSample) for sample in (first, third, fourth))


def test_cancelling_the_caller_aborts_the_request(engine, run):
    async def scenario():
        (task,) = await submitted(engine, ask("gone", num_inference_steps=LONG))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine._gate.running, await engine.generate(ask("gone"))

    running, again = run(scenario())
    assert running == 0 and isinstance(again, RolloutSample)


def test_leaving_a_burst_early_aborts_the_rest(engine, run):
    async def scenario():
        requests = [ask("short"), *(ask(str(i), num_inference_steps=LONG) for i in range(3))]
        items = engine.generate_all(requests)
        await anext(items)
        await items.aclose()
        return engine._gate.running

    assert run(scenario()) == 0


PER_MODE: dict[str, list[RolloutSample]] = {}
"""Samples under each policy, by mode that has run: they must be equal."""


def test_lora_comes_goes_and_is_replaced(engine, run, loras, request):
    async def scenario():
        samples = [await engine.generate(ask("base"))]
        for policy in loras:
            await engine.load_lora(policy)
            samples.append(await engine.generate(ask(f"lora {policy.name}")))
        await engine.load_lora(loras[1], scale=0.5)
        samples.append(await engine.generate(ask("half")))
        await engine.remove_lora()
        samples.append(await engine.generate(ask("base again")))
        return samples, await engine._omni.list_loras()

    before = engine.policy_version
    samples, loaded = run(scenario())
    assert loaded == []
    assert [sample.policy_version - before for sample in samples] == [0, 1, 2, 3, 4]
    *policies, base = samples
    assert torch.equal(policies[0].trajectory_latents, base.trajectory_latents)
    assert not any(same(a, b, 1e-3) for i, a in enumerate(policies) for b in policies[:i])
    PER_MODE[request.node.callspec.id] = samples
    for others in PER_MODE.values():
        assert all(same(a, b) for a, b in zip(samples, others, strict=True))


def test_many_swaps_leave_one_adapter_in_memory(engine, run, loras):
    async def scenario():
        for i in range(6):
            await engine.load_lora(loras[i % 2])
        loaded = await engine._omni.list_loras()
        await engine.remove_lora()
        return loaded

    assert len(run(scenario())) == 1


def test_a_lora_that_does_not_fit_leaves_the_old_one_serving(engine, run, loras, transformer, tmp_path):
    strange = {name.replace("transformer_blocks.0", "transformer_blocks.99"): w for name, w in transformer.items()}
    cut = {name: weight[:, :-1] if weight.ndim == 2 else weight for name, weight in transformer.items()}
    bad = {
        "transformer_blocks.99": write_lora(tmp_path / "strange", strange, 1),
        "does not fit": write_lora(tmp_path / "cut", cut, 1),
        "to_nothing": write_lora(tmp_path / "leaf", {"attn.to_nothing.weight": torch.ones(4, 4)}, 1, ("to_nothing",)),
    }

    async def scenario():
        await engine.load_lora(loras[0])
        old, version = await engine.generate(ask("old")), engine.policy_version
        for message, folder in bad.items():
            with pytest.raises(RolloutError, match=message):
                await engine.load_lora(folder)
        with pytest.raises(ValueError, match="remove_lora"):
            await engine.load_lora(loras[1], scale=0.0)
        still = await engine.generate(ask("still"))
        await engine.remove_lora()
        return old, still, version

    old, still, version = run(scenario())
    assert torch.equal(old.trajectory_latents, still.trajectory_latents) and still.policy_version == version


def test_a_policy_that_arrives_in_mid_flight_waits(engine, run, loras):
    async def scenario():
        alone = await engine.generate(ask("alone", num_inference_steps=LONG))
        version = engine.policy_version
        tasks = await submitted(engine, ask("a", num_inference_steps=LONG))
        change = asyncio.create_task(engine.load_lora(loras[0]))
        while not engine._gate._changes:
            await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(ask("late")))
        running, late = await asyncio.gather(*tasks, late)
        await change
        direct = await engine.generate(ask("direct"))
        await engine.remove_lora()
        return alone, running, late, direct, version

    alone, running, late, direct, version = run(scenario())
    assert torch.equal(running.trajectory_latents, alone.trajectory_latents) and running.policy_version == version
    assert torch.equal(late.trajectory_latents, direct.trajectory_latents) and late.policy_version == version + 1


def test_weights_are_replaced_as_a_whole_under_wrapped_layers_too(engine, run, loras, transformer):
    original = {f"transformer.{name}": tensor for name, tensor in transformer.items()}
    changed = {name: tensor * 1.1 for name, tensor in original.items()}

    async def scenario():
        await engine.load_lora(loras[0])
        await engine.remove_lora()
        base = await engine.generate(ask("base"))
        loaded = await engine.update_weights(changed)
        new = await engine.generate(ask("new"))
        await engine.update_weights(original.items())
        return base, loaded, new, await engine.generate(ask("back"))

    before = engine.policy_version + 2
    base, loaded, new, back = run(scenario())
    assert loaded == len(transformer)
    assert not same(base, new, 1e-3) and torch.equal(base.trajectory_latents, back.trajectory_latents)
    assert [sample.policy_version - before for sample in (base, new, back)] == [0, 1, 2]


def test_weights_that_do_not_fit_change_nothing(engine, run, transformer):
    original = {f"transformer.{name}": tensor * 2 for name, tensor in transformer.items()}
    name = next(name for name in original if name.endswith("to_q.weight"))
    bad = {
        name.replace("to_q", "to_x"): original | {name.replace("to_q", "to_x"): original[name]},
        "to_qkv": {key: tensor for key, tensor in original.items() if key != name},
        name: original | {name: original[name][:-1]},
        "vae.x": original | {"vae.x": original[name]},
    }

    async def scenario():
        base, version = await engine.generate(ask("base")), engine.policy_version
        for message, weights in bad.items():
            with pytest.raises(RolloutError, match=message):
                await engine.update_weights(weights)
        return base, await engine.generate(ask("still")), version

    base, still, version = run(scenario())
    assert torch.equal(base.trajectory_latents, still.trajectory_latents) and still.policy_version == version


def test_a_sleeping_engine_says_so_and_wakes_up_as_it_was(engine, run):
    async def scenario():
        before = await engine.generate(ask("before"))
        await engine.sleep()
        await engine.sleep()
        for call in (engine.generate(ask("asleep")), engine.remove_lora()):
            with pytest.raises(RolloutError, match="wake_up"):
                await call
        await engine.wake_up()
        await engine.wake_up()
        return before, await engine.generate(ask("after"))

    before, after = run(scenario())
    assert torch.equal(before.trajectory_latents, after.trajectory_latents)
    assert before.policy_version == after.policy_version


def test_a_dead_worker_is_told_and_not_waited_for(live, run):
    """The last of a mode with worker processes."""
    engine, executor = live
    if executor == "uni":
        pytest.skip("the worker lives in this process")

    async def scenario():
        (worker,) = (child for child in multiprocessing.active_children() if "DiffusionWorker" in child.name)
        tasks = await submitted(engine, *(ask(str(i), num_inference_steps=1000) for i in range(2)))
        worker.kill()
        died = await asyncio.gather(*tasks, return_exceptions=True)
        late = await asyncio.gather(engine.generate(ask("late")), return_exceptions=True)
        with pytest.raises(RolloutError):
            await engine.stats()
        return [*died, *late]

    for error in run(scenario()):
        assert isinstance(error, RolloutError) and "died" in error.message


def test_closing_ends_what_is_in_flight(live, run):
    """The last of a mode: the fixture's own close then does nothing."""
    engine, executor = live
    if executor == "mp":
        pytest.skip("the test before has killed the worker")

    async def scenario():
        tasks = await submitted(engine, *(ask(str(i), num_inference_steps=LONG) for i in range(2)))
        await engine.close()
        await engine.close()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(RolloutError, match="closed"):
            await engine.generate(ask("late"))
        return ended

    for error in run(scenario()):
        assert isinstance(error, RolloutError) and error.message == "the engine was closed"


def test_engine_arguments_follow_the_plan_exactly():
    step_wise = plan(RolloutMode.STEP_WISE)
    common = {"adapter": ADAPTER, "dtype": "float32", "executor": None}
    arguments = engine_arguments(step_wise, **common, engine_kwargs={"max_num_seqs": CAP, "enable_sleep_mode": True})
    assert arguments["step_execution"] is True and arguments["max_num_seqs"] == CAP and arguments["enable_sleep_mode"]
    assert arguments["distributed_executor_backend"] == "uni"
    assert engine_arguments(step_wise, **common, engine_kwargs={"num_gpus": 2})["distributed_executor_backend"] == "mp"
    with pytest.raises(ValueError, match="max_num_seqs=8"):
        engine_arguments(step_wise, **common, engine_kwargs={"max_num_seqs": 8})
