"""Changes of the policy on a running engine: LoRA, weights, sleep."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from tests.workers.engines import BATCHED, MERGED, SD3_WAVES, SERIAL, STEP_ONLY, collect, same, solo
from tests.workers.policies import write_lora
from verl_omni.pipelines import worker_extension
from verl_omni.workers.rollout.request import RolloutError, RolloutSample
from verl_omni.workers.rollout.staging import LoraAdapter

pytestmark = pytest.mark.engine

EVERY_LEAF = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "net.0.proj")
STRANGE = {f"base_model.model.strange.lora_{half}.weight": torch.ones(1, 1) for half in "AB"}

PER_FAMILY: dict[str, list[list[RolloutSample]]] = {}
"""Samples under each policy, of every engine that has run: those of one family must be equal."""


@pytest.mark.parametrize("kind", [*BATCHED, *MERGED, SERIAL, STEP_ONLY, SD3_WAVES], indirect=True, ids=str)
def test_lora_comes_goes_and_is_replaced_and_means_the_same_in_every_mode(engine, kind, run, ask, loras):
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
    others = PER_FAMILY.setdefault(kind.family, [])
    assert all(same(a, b) for other in others for a, b in zip(samples, other, strict=True))
    others.append(samples)


@pytest.mark.parametrize("kind", MERGED, indirect=True, ids=str)
def test_a_merged_lora_is_the_checkpoint_with_the_lora_added(engine, run, ask, transformer, tmp_path):
    lora = write_lora(tmp_path / "lora", transformer, 1, EVERY_LEAF)
    original = {f"transformer.{name}": tensor for name, tensor in transformer.items()}
    added = dict(original)
    halves = load_file(lora / "adapter_model.safetensors")
    for name, tensor in transformer.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in halves:  # alpha is the rank
            delta = 0.1 * halves[f"{module}.lora_B.weight"] @ halves[f"{module}.lora_A.weight"]
            added[f"transformer.{name}"] = tensor + delta

    async def scenario():
        base = await engine.generate(ask("base"))
        await engine.load_lora(lora, scale=0.1)
        merged = await engine.generate(ask("merged"))
        await engine.remove_lora()
        await engine.update_weights(added)
        loaded = await engine.generate(ask("loaded"))
        await engine.update_weights(original)
        return base, merged, loaded, await engine.generate(ask("back"))

    base, merged, loaded, back = run(scenario())
    assert len(halves) // 2 == sum(added[name] is not original[name] for name in original) > 10
    assert same(merged, loaded) and not same(merged, base, 1e-3)
    assert torch.equal(base.trajectory_latents, back.trajectory_latents)


@pytest.mark.parametrize("kind", MERGED, indirect=True, ids=str)
def test_a_merged_lora_stays_through_new_weights_refused_changes_and_sleep(engine, run, ask, loras, transformer):
    original = {f"transformer.{name}": tensor for name, tensor in transformer.items()}
    changed = {name: tensor * 1.1 for name, tensor in original.items()}

    async def scenario():
        await engine.load_lora(loras[0])
        merged = [await engine.generate(ask("merged"))]
        with pytest.raises(RolloutError, match="no weight, or only a part"):
            await engine.update_weights(dict(list(changed.items())[1:]))
        with pytest.raises(RolloutError, match="no layers for these LoRA modules"):
            await engine.load_lora(LoraAdapter(config={"r": 1, "lora_alpha": 1}, tensors=STRANGE))
        await engine.sleep()
        await engine.wake_up()
        merged.append(await engine.generate(ask("awake")))
        await engine.update_weights(changed)
        both = [await engine.generate(ask("changed, merged"))]
        await engine.remove_lora()
        weights = [await engine.generate(ask("changed"))]
        await engine.update_weights(original)
        base = await engine.generate(ask("base"))
        await engine.update_weights(changed)  # as an engine that was started with them
        weights.append(await engine.generate(ask("fresh")))
        await engine.load_lora(loras[0])
        both.append(await engine.generate(ask("fresh, merged")))
        await engine.remove_lora()
        await engine.update_weights(original)
        return base, merged, weights, both

    version = engine.policy_version
    base, *pairs = run(scenario())
    assert all(torch.equal(a.trajectory_latents, b.trajectory_latents) for a, b in pairs)
    policies = [base, *(first for first, _ in pairs)]
    assert not any(same(a, b, 1e-3) for i, a in enumerate(policies) for b in policies[:i])
    assert [sample.policy_version - version for sample in pairs[0]] == [1, 1]


async def rescored(engine, requests, recorded, rows, *loras):
    """Log-probs [N, W] of what was recorded, with so many rows in a forward and `loras`, in turn, named by requests."""
    asked = []
    for request, lora in zip(requests, itertools.cycle(loras or [{}])):
        prompt, knobs = request.to_engine()
        asked.append((prompt, OmniDiffusionSamplingParams(**knobs, **lora)))
    latents = torch.cat([sample.trajectory_latents for sample in recorded])
    return await engine.call_worker("rescore", asked, latents, rows)


@pytest.mark.parametrize("kind", [*BATCHED, *MERGED], indirect=True, ids=str)
def test_recorded_steps_are_scored_again_by_their_policy_in_any_batch_shape(engine, kind, run, ask, loras):
    requests = [ask(f"r{seed}", seed=seed) for seed in range(3)]

    async def burst():
        items = await collect(engine, requests)
        return [items[request.request_id] for request in requests]

    async def scenario():
        base = await burst()
        by_base = [await rescored(engine, requests, base, rows) for rows in (1, 2)]
        await engine.load_lora(loras[0], scale=0.5)
        changed = await burst()
        lora = {"lora_request": engine._lora, "lora_scale": engine._lora_scale}
        by_lora = [await rescored(engine, requests, changed, rows, lora) for rows in (1, 2)]
        other = await rescored(engine, requests, base, 2, lora)
        with pytest.raises(RolloutError, match=r"rescore failed: .*several LoRAs, or scales"):
            await rescored(engine, requests, base, 2, lora, lora | {"lora_scale": 0.25})
        # The LoRA stays in the layers after the last request that named it.
        none_named = await rescored(engine, requests, base, 2)
        await engine.remove_lora()
        return base, by_base, changed, by_lora, other, none_named

    base, by_base, changed, by_lora, other, none_named = run(scenario())
    for samples, scores in ((base, by_base), (changed, by_lora)):
        recorded = torch.cat([sample.trajectory_log_probs for sample in samples])
        assert all(torch.allclose(recorded, score, atol=1e-5, rtol=0) for score in scores)
    assert torch.equal(none_named, other if kind.merge_lora else by_base[1])
    assert not torch.allclose(other, by_base[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("leaf", ["to_q", "to_out.0", "add_k_proj", "to_add_out"])
def test_a_lora_acts_on_every_kind_of_layer(engine, run, ask, transformer, tmp_path, leaf):
    async def scenario():
        base = await engine.generate(ask("base"))
        await engine.load_lora(write_lora(tmp_path / "lora", transformer, 1, (leaf,)))
        changed = await engine.generate(ask("changed"))
        await engine.remove_lora()
        return base, changed

    base, changed = run(scenario())
    assert not same(base, changed, 1e-3)


def test_many_swaps_leave_one_adapter_in_memory(engine, run, loras):
    async def scenario():
        for i in range(6):
            await engine.load_lora(loras[i % 2])
        loaded = await engine._omni.list_loras()
        await engine.remove_lora()
        return loaded

    assert len(run(scenario())) == 1


def test_a_lora_that_does_not_fit_leaves_the_old_one_serving(engine, run, ask, loras, transformer, tmp_path):
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
        with pytest.raises(ValueError, match="scale must be a finite number"):
            await engine.load_lora(loras[1], scale=torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"which is not .* with r=2 of its config"):
            await engine.load_lora(LoraAdapter(config={"r": 2, "lora_alpha": 1}, tensors=STRANGE))
        still = await engine.generate(ask("still"))
        await engine.remove_lora()
        return old, still, version

    old, still, version = run(scenario())
    assert torch.equal(old.trajectory_latents, still.trajectory_latents) and still.policy_version == version


def test_weights_are_replaced_as_a_whole_under_wrapped_layers_too(engine, run, ask, loras, transformer):
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


def test_weights_that_do_not_fit_change_nothing(engine, run, ask, transformer):
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


def test_a_sleeping_engine_says_so_and_wakes_up_as_it_was(engine, run, ask):
    async def scenario():
        before = await solo(engine, [ask("before")])
        await engine.stats(reset=True)
        await engine.sleep()
        await engine.sleep()
        for call in (engine.generate(ask("asleep")), engine.remove_lora()):
            with pytest.raises(RolloutError, match="wake_up"):
                await call
        await engine.wake_up()
        await engine.wake_up()
        return [*before, await engine.generate(ask("after"))], await engine.stats()

    (before, after), stats = run(scenario())
    assert torch.equal(before.trajectory_latents, after.trajectory_latents)
    assert before.policy_version == after.policy_version
    assert stats.encodes_computed == 2  # the cached prompts were given up


@pytest.mark.parametrize("kind", [kind for kind in BATCHED if kind.executor == "uni"], indirect=True, ids=str)
def test_a_refused_sleep_names_the_key_and_leaves_the_engine_serving(engine, run, ask, monkeypatch):
    check = worker_extension.check_sleep_mode
    monkeypatch.setattr(worker_extension, "check_sleep_mode", lambda _, enabled: check(torch.device("cuda"), enabled))

    async def scenario():
        with pytest.raises(RolloutError, match=r"engine_kwargs\.vllm_omni\.enable_sleep_mode=true"):
            await engine.sleep()
        return await engine.generate(ask("awake"))

    assert isinstance(run(scenario()), RolloutSample)


@pytest.mark.parametrize(("device", "enabled"), [("cuda:1", True), ("cpu", False), ("cpu", True)])
def test_sleep_is_granted_where_it_frees_what_there_is(device, enabled):
    worker_extension.check_sleep_mode(torch.device(device), enabled)
