"""The forecast of device memory, and what happens when it runs out."""

from __future__ import annotations

import dataclasses
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_omni.pipelines import memory
from verl_omni.pipelines.memory import (
    SAFETY_SHARE,
    STEP_LATENTS,
    block_bytes,
    container_memory,
    decode_limit,
    forecast_rows,
    forward_limit,
    free_memory,
    is_out_of_memory,
    kept_bytes,
    rows_that_fit,
)
from verl_omni.pipelines.params import RequestError
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.pipelines.rows import Rollout, Row, TextBatch
from verl_omni.testing.harness import AdapterEngine
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

CPU = torch.device("cpu")


def out_of_memory(message="CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it."):
    return torch.OutOfMemoryError(message)


# ---- forecast


def test_the_forecast_grows_with_tokens_and_bytes_and_takes_the_larger_of_attention_and_mlp():
    wide = block_bytes(width=64, feed_forward=256, tokens=10, element_bytes=2)
    assert wide == 10 * 2 * (5 * 64 + 3 * 256)
    assert block_bytes(width=64, feed_forward=256, tokens=30, element_bytes=4) == 6 * wide
    assert block_bytes(width=64, feed_forward=64, tokens=10, element_bytes=2) == 10 * 2 * 15 * 64


@given(rows=st.integers(1, 600), cost=st.integers(1, 10**9), available=st.floats(-1e12, 1e12))
def test_all_rows_share_a_forward_if_they_fit_and_a_power_of_two_if_not(rows, cost, available):
    got = rows_that_fit(rows, row_cost=cost, available=available)
    if rows * cost <= available:
        assert got == rows
    else:
        assert got < rows or rows == 1
        assert got == 1 or (got.bit_count() == 1 and got * cost <= available)
        assert 2 * got * cost > available


def test_a_little_less_memory_changes_nothing():
    assert {rows_that_fit(32, row_cost=10, available=free) for free in range(160, 320)} == {16}
    assert rows_that_fit(32, row_cost=10, available=math.inf) == 32


def test_what_the_driver_has_and_torch_has_not_handed_out_is_free_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert free_memory(torch.device("cuda", 0)) == 1000 + 500 - 300


def test_the_machine_or_its_container_says_what_is_free_on_a_cpu(monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=700))
    for limit, free in ((None, 700), (900, 700), (400, 400)):
        monkeypatch.setattr(memory, "container_memory", lambda limit=limit: limit)
        assert free_memory(CPU) == free


def test_a_container_has_what_its_limit_leaves_and_the_file_pages_it_can_drop(tmp_path):
    assert container_memory(tmp_path) is None
    v1 = tmp_path / "memory"
    v1.mkdir()
    (v1 / "memory.limit_in_bytes").write_text("1000\n")
    (v1 / "memory.usage_in_bytes").write_text("900\n")
    (v1 / "memory.stat").write_text("cache 80\ninactive_file 50\ntotal_inactive_file 60\n")
    assert container_memory(tmp_path) == 150
    (tmp_path / "memory.max").write_text("max\n")
    assert container_memory(tmp_path) == 150
    (tmp_path / "memory.max").write_text("2000\n")
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert container_memory(tmp_path) == 1700


def gathered(*windows, texts=(3,), record=True):
    """States of one row each with latents [4, 5], a window, and in turn a text of so many tokens."""

    def state(i, window):
        row = Row(generator=None, window=window, table=None, stochastic=[], record=record)
        text = {"prompt_embeds": torch.zeros(texts[i % len(texts)], 6)}
        rollout = Rollout(params=None, rows=[row], cond=text, uncond={"prompt_embeds": torch.zeros(1, 6)})
        return SimpleNamespace(latents=torch.zeros(1, 4, 5), extra={"rollout": rollout})

    return [state(i, window) for i, window in enumerate(windows)]


def test_beside_a_forward_rows_keep_texts_latents_of_a_step_and_those_recorded_over_all_windows():
    latents, text = 4 * 5 * 4, (7 + 1) * 6 * 4
    states = gathered((0, 2), (1, 3), texts=(3, 7))
    assert kept_bytes(states) == 2 * (latents * (STEP_LATENTS + 4) + text)
    states = gathered((0, 2), (1, 3), texts=(3, 7), record=False)
    assert kept_bytes(states) == 2 * (latents * STEP_LATENTS + text)


def test_rows_of_a_forward_follow_from_free_memory_less_the_safety_share_and_what_is_kept(monkeypatch):
    states = gathered(*[(0, 2)] * 12, texts=(3, 7))
    need = 5 * 7000 + kept_bytes(states)
    asked = []

    def forecast(free, most=math.inf, devices=1, states=states):
        monkeypatch.setattr(memory, "free_memory", lambda device: asked.append(device) or free)
        return forecast_rows(states, lambda text: 1000 * text, most=most, device=CPU, devices=devices)

    assert forecast(math.ceil(need / (1 - SAFETY_SHARE))) == 4
    assert forecast(10 * need) == 12
    assert forecast(10 * need, most=2 * 7000) == 2
    assert forecast(0) == 1
    assert asked == [CPU] * 4
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda least, op: least.fill_(8 * 7000))
    assert forecast(10 * need, devices=2) == 8
    assert len(asked) == 5
    assert forecast(0, states=states[:1]) == 1
    assert len(asked) == 5


# ---- errors


def test_a_failed_allocation_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(out_of_memory())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("not enough memory of the prompt"))


class Runs:
    """Squares rows, and runs out of memory above `fits` of them."""

    def __init__(self, fits):
        self.fits, self.sizes, self.held, self.halvings = fits, [], None, 0
        self.limit = forward_limit(CPU, self.halve)

    def halve(self):
        self.halvings += 1

    def __call__(self, rows):
        # Not even a part of what failed before may still be held when it runs again.
        assert self.held is None or self.held() is None
        self.sizes.append(len(rows))
        if len(rows) > self.fits:
            activations = torch.zeros(3)
            self.held = weakref.ref(activations)
            raise out_of_memory()
        return rows**2

    def run(self, *parts, cost=10):
        done = self.limit.run(parts, self, cost=lambda part: cost, told=lambda part: "8x8 pixels")
        assert torch.equal(torch.cat([result for _, result in done]), torch.cat(parts) ** 2)
        assert all(torch.equal(part**2, result) for part, result in done)
        sizes, self.sizes = self.sizes, []
        return sizes


def test_only_the_part_that_failed_is_repeated_in_halves_and_the_limit_stays(caplog):
    runs = Runs(fits=3)
    assert runs.run(torch.arange(3), torch.arange(8), torch.arange(6)) == [3, 8, 4, 2, 2, 2, 2, 2, 2, 2]
    assert runs.halvings == 2
    assert len(caplog.records) == 2
    assert caplog.messages[-1] == (
        "a transformer forward ran out of memory over 4 rows (8x8 pixels) and is repeated with 2 at a time, as is what "
        "follows; write rollout.engine_kwargs.vllm_omni.rows_per_forward=2 to start with that: "
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert runs.run(torch.arange(4)) == [2, 2]
    assert runs.run(torch.arange(8), cost=5) == [4, 2, 2, 2, 2]
    assert runs.halvings == 3
    runs.limit.forget()
    assert runs.run(torch.arange(4)) == [4, 2, 2]


def test_what_large_rows_taught_binds_small_ones_by_their_cost():
    runs = Runs(fits=4)
    assert runs.run(torch.arange(8), cost=100) == [8, 4, 4]
    runs.fits = 99
    assert runs.run(torch.arange(16), cost=25) == [16]
    assert runs.run(torch.arange(4), cost=400) == [1, 1, 1, 1]


def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_change():
    runs = Runs(fits=0)
    with pytest.raises(
        RequestError, match=r"over one row alone \(8x8 pixels\): ask for a smaller .* shorter prompt.*2.00"
    ):
        runs.run(torch.arange(2))
    assert (runs.sizes, runs.halvings) == ([2, 1], 1)
    runs.limit = decode_limit(CPU, runs.halve)
    with pytest.raises(RequestError, match=r"decoding ran out .* smaller height and width or output_type=latent"):
        runs.run(torch.arange(1))


def test_other_errors_pass():
    def run(part):
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        forward_limit(CPU, print).run([torch.arange(2)], run, cost=len, told=str)


def test_the_cache_of_a_cuda_device_is_freed_before_a_part_is_repeated(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("freed"))

    def run(rows):
        events.append(len(rows))
        if len(rows) > 1:
            raise out_of_memory()

    forward_limit(torch.device("cuda", 0), lambda: None).run([torch.arange(2)], run, cost=lambda _: 1, told=str)
    assert events == [2, "freed", 1, 1]


# ---- the engine

ENGINES = [
    ("qwen", "QwenImagePipeline", RolloutMode.REQUEST_LEVEL),
    ("qwen", "QwenImagePipeline", RolloutMode.STEP_WISE),
    ("sd3", "StableDiffusion3Pipeline", RolloutMode.STEP_WISE),
]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: f"{p[0]}-{p[2]}")
def engine(request):
    family, architecture, mode = request.param
    model = request.getfixturevalue(f"tiny_{family}")
    with AdapterEngine(AdapterRegistry.get_class(architecture), model, mode) as engine:
        yield engine


@pytest.fixture
def asked(engine):
    """Eight guided requests with texts of three lengths. What errors taught before is forgotten."""
    engine.pipeline.release()
    engine.pipeline.read_stats(reset=True)
    prompts = ["hi", "a red circle on white", "a blue square, and beside it many more words that make it long"]
    return [
        RolloutRequest(
            request_id=f"r{seed}",
            prompt=prompts[seed % 3],
            negative_prompt="blurry",
            **{engine.pipeline.cfg_key: 4.0},
            height=64,
            width=64,
            num_inference_steps=4,
            sde_window_size=2,
            seed=seed,
        )
        for seed in range(8)
    ]


def same(outputs, wanted):
    for a, b in zip(outputs, wanted, strict=True):
        for name in ("trajectory_latents", "trajectory_log_probs", "trajectory_timesteps"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-5, rtol=0)
        assert int((a.images[0].int() - b.images[0].int()).abs().max()) <= 1
    return True


def watched(engine, monkeypatch, hook, fails):
    """Sizes of the calls of `hook`, which raises the error that ``fails(*arguments)`` returns."""
    stock, sizes = getattr(engine.pipeline, hook), []

    def call(rows, *args):
        sizes.append(len(rows))
        if (error := fails(rows, *args)) is not None:
            raise error
        return stock(rows, *args)

    monkeypatch.setattr(engine.pipeline, hook, call, raising=False)
    return sizes


def room_for(rows, error, before=1001):
    """What fails where the tokens of a forward are more than those of `rows` of the eight in the first one.

    Only at timesteps below `before`.
    """
    whole = []

    def fails(latents, timesteps, text, size):
        tokens = len(latents) * (16 + text.embeds.shape[1])
        whole.append(tokens)
        return error if tokens > rows / 8 * whole[0] and timesteps.max() < before else None

    return fails


@pytest.mark.engine
def test_a_forward_that_runs_out_of_memory_is_halved_and_every_request_finishes_as_without(engine, asked, monkeypatch):
    wanted = engine.run(*asked)
    engine.pipeline.read_stats(reset=True)
    sizes = watched(engine, monkeypatch, "predict_velocity", room_for(3, out_of_memory()))
    assert same(engine.run(*asked), wanted)
    assert sizes[:6] == [8, 4, 2, 2, 2, 2]
    stats = engine.pipeline.read_stats(reset=True)
    assert stats.out_of_memory == 2
    assert stats.batch_sizes == {2: 4 * 4}
    sizes.clear()
    assert same(engine.run(*asked), wanted)
    assert max(sizes) < 8 and sizes[:4] == [2] * 4
    assert engine.pipeline.stats.out_of_memory == 0
    engine.pipeline.release()
    engine.run(*asked)
    assert engine.pipeline.stats.out_of_memory == 2


@pytest.mark.engine
def test_memory_that_is_short_from_the_middle_of_a_trajectory_on_changes_no_value(engine, asked, monkeypatch):
    wanted = engine.run(*asked)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    sizes = watched(engine, monkeypatch, "predict_velocity", room_for(5, error, before=900))
    assert same(engine.run(*asked), wanted)
    assert sizes[:2] == [8, 8] and sizes[-1] in (4, 8) and set(sizes) == {8, 4}
    assert engine.pipeline.stats.out_of_memory == 1


@pytest.mark.engine
def test_a_decode_that_runs_out_of_memory_is_halved_and_the_limit_stays(engine, asked, monkeypatch):
    wanted = engine.run(*asked)
    sizes = watched(engine, monkeypatch, "decode", lambda x, *_: out_of_memory() if len(x) > 3 else None)
    assert same(engine.run(*asked), wanted)
    assert sizes == [8, 4, 2, 2, 2, 2]
    assert same(engine.run(*asked), wanted)
    assert sizes[6:] == [2] * 4
    assert engine.pipeline.stats.out_of_memory == 2


@pytest.mark.engine
@pytest.mark.parametrize("hook", ["predict_velocity", "decode"])
def test_a_row_that_does_not_fit_alone_ends_its_own_request_and_no_other(engine, asked, monkeypatch, hook):
    wanted = engine.run(*asked)
    final = engine.run(dataclasses.replace(asked[5], output_type="latent"))[0].images[0][0]
    mark = final if hook == "decode" else wanted[5].trajectory_latents[0, 0]

    def fails(rows, *_):
        return out_of_memory() if any(torch.allclose(row, mark, atol=1e-4) for row in rows) else None

    watched(engine, monkeypatch, hook, fails)
    outputs = engine.run(*asked)
    assert "over one row alone (64x64 pixels" in str(outputs[5]) and "ask for a smaller height" in str(outputs[5])
    assert same(outputs[:5] + outputs[6:], wanted[:5] + wanted[6:])


@pytest.mark.engine
def test_the_free_memory_bounds_a_forward_where_the_plan_does_not_and_is_asked_for_once_a_gather(
    engine, asked, monkeypatch
):
    pipeline, asks = engine.pipeline, []
    wanted = engine.run(*asked)
    sizes = watched(engine, monkeypatch, "predict_velocity", lambda *_: None)
    monkeypatch.setattr(memory, "kept_bytes", lambda states: 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: asks.append(device) or 50 / (1 - SAFETY_SHARE))
    monkeypatch.setattr(
        pipeline, "row_bytes", lambda image, text: 10 if image == 16 and text > 1 else 99, raising=False
    )
    assert same(engine.run(*asked), wanted)
    assert sizes == [4] * 2 * 2 * 4
    assert asks == [pipeline.device]
    engine.run(asked[0])
    assert len(asks) == 1
    monkeypatch.setattr(pipeline, "rows_per_forward", 3)
    sizes.clear()
    assert same(engine.run(*asked), wanted)
    assert sizes == [3, 3, 2] * 2 * 4
    assert len(asks) == 1
    assert pipeline.stats.out_of_memory == 0


@pytest.mark.engine
def test_a_transformer_of_unknown_width_gives_no_forecast(engine, asked, monkeypatch):
    monkeypatch.setattr(engine.pipeline.transformer, "inner_dim", 64)
    monkeypatch.delattr(engine.pipeline.transformer, "inner_dim")
    monkeypatch.setattr(memory, "kept_bytes", lambda states: 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10)
    assert engine.pipeline.row_bytes(16, 10) == 0
    sizes = watched(engine, monkeypatch, "predict_velocity", lambda *_: None)
    engine.run(*asked)
    assert set(sizes) == {8}


class Alive(TorchDispatchMode):
    """Most bytes of tensors that operations made and that were alive at a time."""

    def __init__(self, known):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.stores, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                store = tensor.untyped_storage()
                self.stores[store._cdata] = StorageWeakRef(store), store.nbytes()
        self.stores = {key: kept for key, kept in self.stores.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.stores.values()))
        return out


@pytest.mark.engine
@pytest.mark.parametrize("lengths", ["equal", "masked"])
def test_a_forward_takes_no_more_than_its_forecast_and_more_than_half_of_it(engine, lengths):
    pipeline, rows, size = engine.pipeline, 4, (256, 256)

    def peak():
        shape = pipeline.latent_shape(*size)
        short, long = (pipeline.encode(pipeline.text_to_ids(text), 128) for text in ("hi", "a red circle on white"))
        texts = [short if lengths == "masked" and pipeline.masks_text else long, *[long] * (rows - 1)]
        text = TextBatch.collate(texts)
        latents = torch.randn(rows, *shape)
        alive = Alive([*pipeline.transformer.parameters(), latents, text.embeds])
        with alive:
            pipeline.predict_velocity(latents, torch.full((rows,), 500.0), text, size)
        return alive.peak, rows * pipeline.row_bytes(pipeline.image_tokens(shape), text.embeds.shape[1])

    taken, forecast = engine.call(peak)
    assert forecast / 2 < taken <= forecast
