"""Qwen-Image and SD3 on the real engine, in each mode: the small inputs that break rollout adapters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from verl_omni.algorithms.flow_sde import row_seed
from verl_omni.pipelines import rows
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.harness import AdapterEngine, Arrival
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

pytestmark = pytest.mark.engine

ARCHITECTURES = {"qwen": "QwenImagePipeline", "sd3": "StableDiffusion3Pipeline"}
MODES = [RolloutMode.REQUEST_LEVEL, RolloutMode.STEP_WISE, RolloutMode.SERIAL]


@pytest.fixture(scope="module", params=[(f, m) for f in ARCHITECTURES for m in MODES], ids=lambda p: f"{p[0]}-{p[1]}")
def engine(request):
    family, mode = request.param
    model = request.getfixturevalue(f"tiny_{family}")
    with AdapterEngine(AdapterRegistry.get_class(ARCHITECTURES[family]), model, mode) as engine:
        yield engine


@pytest.fixture
def ask(engine):
    """Makes requests; ``cfg`` is the guidance scale under this model's own name for it."""

    def make(cfg=None, **knobs):
        base = dict(request_id="r", prompt="a red circle", height=64, width=64, num_inference_steps=4, seed=11)
        guidance = {} if cfg is None else {engine.pipeline.cfg_key: cfg}
        return RolloutRequest(**{**base, **guidance, **knobs})

    return make


def same(a, b, atol=1e-5):
    for name in ("trajectory_latents", "trajectory_log_probs", "trajectory_timesteps"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            torch.testing.assert_close(left, right, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert int((a.images[0].int() - b.images[0].int()).abs().max()) <= 1
    return True


def embeds(output):
    return output.multimodal_output["metadata"]["prompt_embeddings"]


@pytest.fixture
def spied(engine):
    """What the transformer was called with, one dict a forward."""
    calls = []

    def hook(module, args, kwargs):
        calls.append(kwargs)

    handle = engine.pipeline.transformer.register_forward_pre_hook(hook, with_kwargs=True)
    yield calls
    handle.remove()


def test_the_transformer_gets_timesteps_at_full_precision(engine, ask, spied):
    output = engine.run(ask(num_inference_steps=7))[0]
    seen = torch.stack([call["timestep"][0] for call in spied])
    scale = 1 / 1000 if "Qwen" in type(engine.pipeline).__name__ else 1
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen[:6], output.trajectory_timesteps[0] * scale, atol=0, rtol=1e-7)
    assert len(set((seen / scale).tolist())) == 7


@pytest.mark.parametrize("negative", [None, "", "blurry"])
@pytest.mark.parametrize("scale", [None, 0.0, 1.0, 1.0001, 4.0])
def test_guidance_runs_if_the_scale_is_above_one_and_a_negative_prompt_is_given(engine, ask, spied, scale, negative):
    output = engine.run(ask(cfg=scale, negative_prompt=negative, num_inference_steps=2))[0]
    effective = engine.pipeline.default_cfg_scale if scale is None else scale
    guided = effective > 1 and negative is not None
    assert sum(len(call["hidden_states"]) for call in spied) == (4 if guided else 2)
    assert output.multimodal_output["metadata"]["rl"]["true_cfg"] is guided
    assert ("negative_prompt_embeds" in embeds(output)) is guided


def test_both_velocities_of_guidance_share_a_forward_where_tokens_are_few(engine, ask, spied, monkeypatch):
    request = ask(cfg=4.0, negative_prompt="blurry")
    together = engine.run(request)[0]
    text = max(embeds(together)[name].shape[-2] for name in ("prompt_embeds", "negative_prompt_embeds"))
    tokens = 2 * (engine.pipeline.image_tokens(together.trajectory_latents.shape[2:]) + text)
    for limit, rows_of_calls in ((tokens, [2] * 4), (tokens - 1, [1] * 8)):
        spied.clear()
        monkeypatch.setattr(rows, "FUSED_GUIDANCE_TOKENS", limit)
        assert same(engine.run(request)[0], together)
        assert [len(call["hidden_states"]) for call in spied] == rows_of_calls


def test_requests_with_and_without_a_negative_prompt_share_a_batch(engine, ask):
    requests = [ask(cfg=4.0, negative_prompt="blurry"), ask(cfg=4.0), ask(cfg=2.0, negative_prompt="")]
    together = engine.run(*requests)
    alone = [engine.run(request)[0] for request in requests]
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(together[0].trajectory_latents[:, 1:], together[1].trajectory_latents[:, 1:])


def test_prompts_of_other_lengths_change_neither_result_nor_embeddings(engine, ask):
    texts = ["hi", "a red circle", "a blue square on a black background and quite a few more words after that"]
    requests = [ask(prompt=text) for text in texts]
    together, alone = engine.run(*requests), [engine.run(request)[0] for request in requests]
    for a, b in zip(together, alone, strict=True):
        assert same(a, b)
        assert embeds(a)["prompt_embeds"].shape == embeds(b)["prompt_embeds"].shape
        torch.testing.assert_close(embeds(a)["prompt_embeds"], embeds(b)["prompt_embeds"], atol=0, rtol=0)


def test_outputs_of_a_prompt_come_in_order_each_from_its_own_generator(engine, ask):
    requests = [ask(prompt=text, seed=seed, num_outputs_per_prompt=2) for text, seed in (("hi", 1), ("a cat", 2))]
    for request, output in zip(requests, engine.run(*requests), strict=True):
        assert output.images[0].shape == (2, 3, 64, 64)
        for row in range(2):
            seed = row_seed(request.seed, row)
            single = engine.run(dataclasses.replace(request, num_outputs_per_prompt=1, seed=seed))[0]
            torch.testing.assert_close(output.trajectory_latents[row], single.trajectory_latents[0], atol=1e-5, rtol=0)
        assert not torch.equal(output.trajectory_latents[0, 0], output.trajectory_latents[1, 0])


def test_a_request_of_other_length_joins_in_the_middle(engine, ask):
    long, short = ask(num_inference_steps=10), ask(num_inference_steps=6, prompt="hello", seed=12)
    together = engine.run(long, Arrival(request=short, after=3))
    assert same(together[0], engine.run(long)[0])
    assert same(together[1], engine.run(short)[0])
    sigmas = engine.pipeline.schedule(6, engine.pipeline.image_tokens(engine.pipeline.latent_shape(64, 64)))[0]
    torch.testing.assert_close(together[1].trajectory_timesteps[0], sigmas[:5].float())


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_a_window_over_all_steps_records_each_stochastic_one(engine, ask, sde_type):
    output = engine.run(ask(sde_window_size=4, sde_window_range=(0, 4), sde_type=sde_type))[0]
    recorded = 3 if sde_type == "cps" else 4  # cps draws no noise on its way to sigma 0
    assert output.trajectory_log_probs.shape == (1, recorded)
    assert torch.isfinite(output.trajectory_log_probs).all()


@pytest.mark.parametrize(
    "knobs",
    [dict(sde_window_size=0, sde_window_range=(0, 4)), dict(noise_level=0.0), dict(logprobs=False)],
    ids=["empty window", "noise 0", "no logprobs"],
)
def test_nothing_is_recorded_where_nothing_is_stochastic(engine, ask, knobs):
    output = engine.run(ask(**knobs))[0]
    assert output.trajectory_latents is None
    assert output.trajectory_log_probs is None
    assert output.images[0].float().std() > 0


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_rows_of_a_request_record_equally_many_steps_wherever_their_windows_lie(engine, ask, sde_type):
    knobs = dict(sde_type=sde_type, num_outputs_per_prompt=3, sde_window_size=2, sde_window_range=(0, 5))
    outputs = engine.run(*(ask(seed=seed, num_inference_steps=6, **knobs) for seed in range(4)))
    windows = [tuple(w) for o in outputs for w in o.multimodal_output["metadata"]["rl"]["sde_window"]]
    assert len(set(windows)) > 1
    assert all(output.trajectory_log_probs.shape == (3, 2) for output in outputs)


def test_one_step_works(engine, ask):
    output = engine.run(ask(num_inference_steps=1))[0]
    assert output.images[0].shape == (1, 3, 64, 64)
    assert output.trajectory_log_probs is None
    whole = engine.run(ask(num_inference_steps=1, sde_window_size=1, sde_window_range=(0, 1)))[0]
    assert whole.trajectory_timesteps.tolist() == [[1000.0]]
    assert torch.isfinite(whole.trajectory_log_probs).all()


BAD = {
    "no prompt": (dict(prompt=None), "no prompt"),
    "empty token ids": (dict(prompt_token_ids=[], prompt_token_ids_2=[], prompt_token_ids_3=[]), "no valid token"),
    "fractional token": (dict(prompt_token_ids=[1.5], prompt_token_ids_2=[1], prompt_token_ids_3=[1]), "integers"),
    "mask of other length": (
        dict(prompt_token_ids=[9] * 40, prompt_mask=[1], prompt_token_ids_2=[1], prompt_token_ids_3=[1]),
        "prompt_mask has 1 entries for the 40 tokens",
    ),
    "prompt is no text": (dict(prompt=3), "prompt must be a string"),
    "mask without ids": (dict(prompt_mask=[1, 1]), "prompt_mask is given without prompt_token_ids"),
    "ids are one number": (
        dict(prompt_token_ids=5, prompt_token_ids_2=[1], prompt_token_ids_3=[1]),
        "one row of integers",
    ),
    "window range alone": (dict(sde_window_range=(0, 2)), "without sde_window_size"),
    "cps window on the last step": (
        dict(sde_type="cps", sde_window_size=2, sde_window_range=(1, 4)),
        "draws no noise on its last step.*\\[1, 3\\]",
    ),
    "too many steps": (dict(num_inference_steps=10**6), "must be at most 1000"),
    "too many outputs": (dict(num_outputs_per_prompt=10**6), "must be at most 128"),
    "too large": (dict(height=2**20), "must be at most 8192"),
    "long prompt": (
        dict(prompt="word " * 400, max_sequence_length=20),
        "tokens.*[= ]20; shorten it",
    ),
    "long negative prompt": (
        dict(negative_prompt="word " * 400, max_sequence_length=20, guidance_scale=4.0, true_cfg_scale=4.0),
        "^negative_prompt: .*tokens.*[= ]20; shorten it",
    ),
    "half a character": (dict(prompt="a \ud800"), r"prompt is no valid text: it holds '\\ud800'"),
    "limit above the model's": (dict(max_sequence_length=99999), "above this model's limit"),
    "odd height": (dict(height=65), "multiples of 16"),
    "zero width": (dict(width=0), "width=0 must be at least 1"),
    "negative steps": (dict(num_inference_steps=-1), "num_inference_steps=-1 must be at least 1"),
    "fractional steps": (dict(num_inference_steps=2.5), "num_inference_steps must be an integer"),
    "window": (dict(sde_window_size=3, sde_window_range=(2, 4)), "does not fit into sde_window_range=\\[2, 4\\]"),
    "window range": (dict(sde_window_size=3, sde_window_range=5), "two integers"),
    "sde type": (dict(sde_type="ddpm"), "use one of sde, cps, dance_sde"),
    "noise level": (dict(noise_level=-1.0), "noise_level must be a finite number of at least 0"),
    "noise NaN": (dict(noise_level=float("nan")), "noise_level must be a finite number"),
    "noise no float holds": (dict(noise_level=10**5000), "noise_level must be .*, got an integer that no"),
    "guidance no float holds": (
        dict(guidance_scale=10**400, true_cfg_scale=10**400),
        "(guidance|true_cfg)_scale must be a finite number, got an integer that no float holds",
    ),
    "cps noise": (dict(noise_level=1.5, sde_type="cps"), "above 1"),
    "output type": (dict(output_type="gif"), "use one of pt, latent"),
    "seed": (dict(seed="one"), "seed must be"),
    "guidance": (dict(guidance_scale="strong"), "guidance_scale must be a finite number"),
    "negative seed": (dict(seed=-1), "seed"),
    "no outputs": (dict(num_outputs_per_prompt=0), "num_outputs_per_prompt=0 must be at least 1"),
    "logprobs": (dict(logprobs="yes"), "logprobs must be true or false"),
    "unknown token": (
        dict(prompt_token_ids=[10**9] * 40, prompt_token_ids_2=[9], prompt_token_ids_3=[9]),
        "prompt_token_ids holds 1000000000, but the text encoder knows 0 to \\d+; use the model's own",
    ),
    "negative token": (
        dict(negative_prompt_token_ids=[-1] * 40, negative_prompt_token_ids_2=[9], negative_prompt_token_ids_3=[9]),
        "negative_prompt_token_ids holds -1, but",
    ),
}


def test_a_bad_request_fails_alone_and_says_what_to_write(engine, ask):
    good = [ask(seed=seed) for seed in (1, 2, 3)]
    foreign = ("_2", "_3") if engine.pipeline.num_encoders == 1 else ()
    asked = [
        {key: value for key, value in knobs.items() if not key.endswith(foreign or "-")} for knobs, _ in BAD.values()
    ]
    outputs = engine.run(*good, *(ask(**knobs) for knobs in asked))
    for request, output in zip(good, outputs[:3], strict=True):
        assert same(output, engine.run(request)[0])
    for (name, (_, message)), output in zip(BAD.items(), outputs[3:], strict=True):
        assert isinstance(output, Exception), name
        with pytest.raises(type(output), match=message):
            raise output


def test_ids_for_an_encoder_that_is_not_there_or_not_for_all_that_are_name_it(engine, ask):
    one = engine.pipeline.num_encoders == 1
    extra = engine.run(ask(prompt_token_ids=[9] * 40, prompt_token_ids_2=[1]))[0]
    message = "prompt_token_ids_2 is given, but this model has 1" if one else "for all 3 text encoders"
    assert message in str(extra)


@pytest.mark.parametrize(
    ("hook", "output_type", "value"),
    [
        ("predict_velocity", "pt", float("nan")),
        ("predict_velocity", "latent", float("inf")),
        ("decode", "pt", float("nan")),
        ("decode", "pt", float("inf")),
    ],
)
def test_a_row_that_is_not_finite_is_an_error_and_not_an_image(engine, ask, monkeypatch, hook, output_type, value):
    good, bad = ask(seed=1), ask(seed=2, prompt="hello", output_type=output_type)
    want = engine.run(good)[0]
    latents = engine.run(dataclasses.replace(bad, output_type="latent"))[0]
    marked = latents.images[0][0] if hook == "decode" else latents.trajectory_latents[0, 0]
    original = getattr(engine.pipeline, hook)

    def poisoned(latents, *args):
        result = original(latents, *args)
        for row, x in zip(result, latents, strict=True):
            if torch.allclose(x.cpu(), marked, atol=1e-4):
                row.view(-1)[0] = value
        return result

    monkeypatch.setattr(engine.pipeline, hook, poisoned, raising=False)
    outputs = engine.run(good, bad)
    assert same(outputs[0], want)
    assert "NaN or infinite" in str(outputs[1])
    assert f"lower noise_level or {engine.pipeline.cfg_key}, or" in str(outputs[1])


def test_a_decode_that_fails_fails_its_request_alone(engine, ask, monkeypatch):
    requests = [ask(seed=seed) for seed in (1, 2)]
    want = engine.run(*requests)
    last = engine.run(dataclasses.replace(requests[1], output_type="latent"))[0].images[0][0]
    hook = engine.pipeline.decode

    def failing(latents, size):
        if any(torch.allclose(row, last, atol=1e-4) for row in latents):
            raise RuntimeError("planted")
        return hook(latents, size)

    monkeypatch.setattr(engine.pipeline, "decode", failing, raising=False)
    outputs = engine.run(*requests)
    assert same(outputs[0], want[0])
    assert "planted" in str(outputs[1])


WRONG = {
    "encode": lambda hook: lambda *args: {},
    "draw_latents": lambda hook: lambda *args: hook(*args)[..., :-1],
    "predict_velocity": lambda hook: lambda *args: hook(*args)[None],
    "decode": lambda hook: lambda *args: hook(*args)[:, :1],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_hook_that_returns_another_shape_is_named_and_spoils_no_mate(engine, ask, monkeypatch, name):
    marked = ask(seed=5, prompt="the one that goes wrong")
    mates = [ask(seed=seed) for seed in (1, 2)]
    want = engine.run(*mates)
    hook = getattr(engine.pipeline, name)
    first = engine.run(marked)[0].trajectory_latents[0, 0]
    last = engine.run(dataclasses.replace(marked, output_type="latent"))[0].images[0][0]
    engine.pipeline.release()

    def concerns(args):
        if name == "encode":
            return args[0] == engine.pipeline.text_to_ids(marked.prompt)
        if name == "draw_latents":
            return args[2].initial_seed() == 5
        if name == "decode":
            return any(torch.allclose(row, last, atol=1e-4) for row in args[0])
        return any(torch.equal(row, first) for row in args[0])

    def wrapped(*args):
        return WRONG[name](hook)(*args) if concerns(args) else hook(*args)

    monkeypatch.setattr(engine.pipeline, name, wrapped, raising=False)
    outputs = engine.run(marked, *mates)
    assert f"{name} returned" in str(outputs[0])
    assert all(same(output, expected) for output, expected in zip(outputs[1:], want, strict=True))


@pytest.mark.parametrize("name", ["text_to_ids", "encode", "predict_velocity", "decode"])
def test_a_hook_that_asks_the_process_to_stop_ends_its_request_only(engine, ask, monkeypatch, name):
    def stop(*args):
        raise SystemExit("enough")

    want = engine.run(ask())[0]
    with monkeypatch.context() as patch:
        patch.setattr(engine.pipeline, "_tokenize" if name == "text_to_ids" else name, stop, raising=False)
        engine.pipeline.release()
        assert "the adapter raised SystemExit: enough" in str(engine.run(ask())[0])
    assert same(engine.run(ask())[0], want)


def test_token_ids_in_every_form_equal_the_text_and_stay_as_they_are(engine, ask):
    text = "a blue square"
    want = engine.run(ask(prompt=text))[0]
    ids = engine.pipeline.text_to_ids(text)
    forms = [
        lambda row: list(row),
        lambda row: torch.tensor(row),
        lambda row: torch.tensor([row]),
        lambda row: torch.tensor([row], dtype=torch.int32),
    ]
    suffixes = ("", "_2", "_3")
    requests = [
        ask(prompt=None, **{f"prompt_token_ids{s}": form(row) for s, row in zip(suffixes, ids, strict=False)})
        for form in forms
    ]
    padded = {f"prompt_token_ids{s}": [0, 0, *row] for s, row in zip(suffixes, ids, strict=False)}
    masks = {f"prompt_mask{s}": [0, 0, *[1] * len(row)] for s, row in zip(suffixes, ids, strict=False)}
    requests.append(ask(prompt=None, **padded, **masks))
    before = repr(requests)
    assert all(same(output, want) for output in engine.run(*requests))
    assert repr(requests) == before


def test_each_distinct_prompt_is_encoded_once(engine, ask):
    engine.pipeline.load_weights([])  # forgets what is cached
    engine.pipeline.read_stats(reset=True)
    requests = [ask(prompt=text, seed=i, cfg=4.0, negative_prompt="blurry") for i, text in enumerate("abc" * 4)]
    engine.run(*requests)
    assert engine.pipeline.stats.encodes_requested == 24
    assert engine.pipeline.stats.encodes_computed == 4


def test_a_burst_runs_as_one_batch(engine, ask):
    engine.pipeline.read_stats(reset=True)
    engine.run(*(ask(seed=seed, num_inference_steps=4) for seed in range(8)))
    stats = engine.pipeline.stats
    serial = engine.mode is RolloutMode.SERIAL
    assert dict(stats.batch_sizes) == ({1: 32} if serial else {8: 4})
    assert stats.waves == (8 if serial else 1)


def test_a_batch_of_two_sizes_with_as_many_tokens_comes_out_right(engine, ask):
    """Called from outside our scheduler, which would keep them apart."""
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

    requests = [ask(height=64, width=128), ask(height=128, width=64)]
    want = [engine.run(request)[0] for request in requests]
    outputs = engine.call(lambda: engine.pipeline.forward(DiffusionRequestBatch([engine.request(r) for r in requests])))
    for request, output, expected in zip(requests, outputs, want, strict=True):
        assert output.output["payload"]["image"].shape == (1, 3, request.height, request.width)
        torch.testing.assert_close(output.trajectory_latents, expected.trajectory_latents, atol=1e-5, rtol=0)


def test_nothing_of_a_finished_batch_stays_on_the_device(engine, ask):
    engine.run(ask(), ask(seed=2))
    assert engine.pipeline._batch is None
    engine.pipeline.release()
    engine.pipeline.read_stats(reset=True)
    engine.run(ask())
    assert engine.pipeline.stats.encodes_computed == 1


def test_rows_per_forward_bounds_the_forward_and_not_the_result(engine, ask, monkeypatch):
    requests = [ask(seed=seed, cfg=4.0, negative_prompt="blurry") for seed in range(5)]
    want = engine.run(*requests)
    engine.pipeline.read_stats(reset=True)
    monkeypatch.setattr(engine.pipeline, "rows_per_forward", 2)
    outputs = engine.run(*requests)
    assert max(engine.pipeline.stats.batch_sizes) <= 2
    assert all(same(a, b) for a, b in zip(outputs, want, strict=True))
