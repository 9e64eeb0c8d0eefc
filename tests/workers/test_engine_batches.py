"""What shares a batch in a running engine, what comes out of it, and whom a bad request takes with it: nobody."""

import pickle

import pytest
import torch

from tests.workers.engines import BATCHED, CAP, SERIAL, STEP_ONLY, collect, same, solo
from verl_omni.workers.rollout.request import RolloutError, RolloutSample

pytestmark = pytest.mark.engine


def test_a_burst_is_one_wave_and_every_sample_is_complete(engine, run, ask):
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


@pytest.mark.parametrize("kind", [*BATCHED, SERIAL], indirect=True, ids=str)
def test_a_sample_tells_how_long_its_request_waited_for_a_place(engine, run, ask):
    assert run(engine.generate(ask("a"))).queue_wait_s > 0


def test_a_sample_pickles_to_the_bytes_of_its_own_rows(engine, run, ask):
    samples = run(collect(engine, [ask(str(i), seed=i, num_outputs_per_prompt=2) for i in range(CAP)]))
    for sample in samples.values():
        tensors = [value for value in vars(sample).values() if isinstance(value, torch.Tensor)]
        tensors += list(sample.prompt_embeddings.values())
        assert len(pickle.dumps(sample)) < sum(tensor.nbytes for tensor in tensors) + 500 * len(tensors)


def test_samples_of_a_prompt_share_its_embeddings_unless_they_come_from_another_process(engine, kind, run, ask):
    samples = run(collect(engine, [ask(str(i), seed=i) for i in range(CAP)])).values()
    addresses = {sample.prompt_embeddings["prompt_embeds"].data_ptr() for sample in samples}
    assert len(addresses) == (1 if kind.executor == "uni" else CAP)


def test_latents_instead_of_pixels(engine, run, ask):
    sample = run(engine.generate(ask("latent", output_type="latent")))
    assert sample.images is None and sample.latents.dtype == torch.float32


def test_a_request_without_a_seed_draws_one_and_tells_it(engine, run, ask):
    async def scenario():
        drawn = await collect(engine, [ask(name, seed=None) for name in ("a", "b")])
        return drawn, await engine.generate(ask("again", seed=drawn["a"].seed))

    drawn, again = run(scenario())
    assert drawn["a"].seed != drawn["b"].seed and not same(drawn["a"], drawn["b"], 1e-3)
    assert same(drawn["a"], again)


def test_unlike_requests_share_one_wave(engine, run, ask):
    unlike = [
        ask("plain"),
        ask("scale", scale=2.0),
        ask("no guidance", negative_prompt=None, negative_prompt_token_ids=None),
        ask("two images", num_outputs_per_prompt=2),
    ]

    async def scenario():
        await engine.stats(reset=True)
        together = await collect(engine, unlike)
        return together, await engine.stats(), await solo(engine, unlike)

    together, stats, alone = run(scenario())
    assert dict(stats.batch_sizes) == {5: 4} and stats.waves == 1
    assert all(same(together[sample.request_id], sample) for sample in alone)


def test_a_burst_of_two_sizes_batches_each(engine, run, ask):
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
        ({"height": [64]}, "height"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"seed": "seven"}, "seed"),
        ({"prompt": None, "prompt_token_ids": None}, "prompt"),
        ({"guidance_scale": "high"}, "guidance_scale must be a finite number"),
        ({"height": torch.tensor([64, 64])}, "height must be a number"),
    ],
)
def test_a_bad_request_fails_alone(engine, run, ask, knobs, message):
    requests = [ask("good", seed=1), ask("bad", **knobs), ask("other", seed=2)]
    items = run(collect(engine, requests))
    assert isinstance(items["good"], RolloutSample) and isinstance(items["other"], RolloutSample)
    assert isinstance(items["bad"], RolloutError)
    assert "request 'bad'" in str(items["bad"]) and message in items["bad"].message


def test_a_request_id_is_used_once_at_a_time(engine, run, ask):
    async def scenario():
        twins = [item async for item in engine.generate_all([ask("twin"), ask("twin")])]
        return twins, await engine.generate(ask("twin"))

    twins, again = run(scenario())
    error, sample = sorted(twins, key=lambda item: isinstance(item, RolloutSample))
    assert isinstance(error, RolloutError) and "in flight" in error.message
    assert same(sample, again)


def test_each_note_of_the_plan_is_logged_once(engines, caplog):
    engines.close()
    with caplog.at_level("INFO", "verl_omni"):
        engines.take(STEP_ONLY)
    assert [caplog.messages.count(text) for text in (STEP_ONLY.plan.log_line(), *STEP_ONLY.notes)] == [1, 1, 1]


@pytest.mark.parametrize("kind", [STEP_ONLY], indirect=True, ids=str)
def test_a_step_only_adapter_batches_as_many_rows_as_the_plan_allows(engine, run, ask):
    requests = [ask(str(i), seed=i) for i in range(CAP)]

    async def scenario():
        await engine.stats(reset=True)
        together = await collect(engine, requests)
        return together, await engine.stats(), await solo(engine, requests)

    together, stats, alone = run(scenario())
    assert dict(stats.batch_sizes) == {2: 2 * 4} and stats.waves == 1
    assert all(same(together[sample.request_id], sample) for sample in alone)
