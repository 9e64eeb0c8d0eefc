"""What happens on the engine when memory runs out, or is forecast to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_omni.pipelines import memory
from verl_omni.pipelines.memory import SAFETY_SHARE
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.pipelines.rows import TextBatch
from verl_omni.testing.harness import AdapterEngine
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

pytestmark = pytest.mark.engine

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
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
    """Eight guided requests with texts of three lengths: a forward has 16 rows. What errors taught is forgotten."""
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
    """What fails where the tokens of a forward are more than the share of `rows` of eight of those in the first one.

    Only at timesteps below `before`.
    """
    whole = []

    def fails(latents, timesteps, text, size):
        tokens = len(latents) * (16 + text.embeds.shape[1])
        whole.append(tokens)
        return error if tokens > rows / 8 * whole[0] and timesteps.max() < before else None

    return fails


def test_a_forward_that_runs_out_of_memory_is_halved_and_every_request_finishes_as_without(engine, asked, monkeypatch):
    wanted = engine.run(*asked)
    engine.pipeline.read_stats(reset=True)
    sizes = watched(engine, monkeypatch, "predict_velocity", room_for(3, OUT_OF_MEMORY))
    assert same(engine.run(*asked), wanted)
    assert sizes[:4] == [16, 8, 4, 4]
    stats = engine.pipeline.read_stats(reset=True)
    assert stats.out_of_memory == 2
    assert stats.batch_sizes == {4: 2 * 4}
    sizes.clear()
    assert same(engine.run(*asked), wanted)
    assert max(sizes) < 16 and sizes[:2] == [4] * 2
    assert engine.pipeline.stats.out_of_memory == 0
    engine.pipeline.release()
    engine.run(*asked)
    assert engine.pipeline.stats.out_of_memory == 2


def test_memory_that_is_short_from_the_middle_of_a_trajectory_on_changes_no_value(engine, asked, monkeypatch):
    wanted = engine.run(*asked)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    sizes = watched(engine, monkeypatch, "predict_velocity", room_for(5, error, before=900))
    assert same(engine.run(*asked), wanted)
    assert sizes[0] == 16 and sizes[-1] == 8 and set(sizes) == {16, 8}
    assert engine.pipeline.stats.out_of_memory == 1


def test_a_decode_that_runs_out_of_memory_is_halved_and_the_limit_stays(engine, asked, monkeypatch):
    wanted = engine.run(*asked)
    sizes = watched(engine, monkeypatch, "decode", lambda x, *_: OUT_OF_MEMORY if len(x) > 3 else None)
    assert same(engine.run(*asked), wanted)
    assert sizes == [8, 4, 2, 2, 2, 2]
    assert same(engine.run(*asked), wanted)
    assert sizes[6:] == [2] * 4
    assert engine.pipeline.stats.out_of_memory == 2


@pytest.mark.parametrize("hook", ["predict_velocity", "decode"])
def test_a_row_that_does_not_fit_alone_ends_its_own_request_and_no_other(engine, asked, monkeypatch, hook):
    wanted = engine.run(*asked)
    final = engine.run(dataclasses.replace(asked[5], output_type="latent"))[0].images[0][0]
    mark = final if hook == "decode" else wanted[5].trajectory_latents[0, 0]

    def fails(rows, *_):
        return OUT_OF_MEMORY if any(torch.allclose(row, mark, atol=1e-4) for row in rows) else None

    watched(engine, monkeypatch, hook, fails)
    outputs = engine.run(*asked)
    assert "over one row alone (64x64 pixels" in str(outputs[5]) and "ask for a smaller height" in str(outputs[5])
    assert same(outputs[:5] + outputs[6:], wanted[:5] + wanted[6:])


@pytest.mark.parametrize("hook", ["predict_velocity", "decode"])
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, ValueError("planted")], ids=["memory", "other"])
def test_what_several_devices_run_together_fails_for_all_of_its_requests_and_once(
    engine, asked, monkeypatch, hook, error
):
    for limit in (engine.pipeline._forwards, engine.pipeline._decodes):
        monkeypatch.setattr(limit, "devices", 2)
    sizes = watched(engine, monkeypatch, hook, lambda *_: error)
    outputs = [str(output) for output in engine.run(*asked)]
    setting, rows = ("rows_per_forward=8", 16) if hook == "predict_velocity" else ("decode_rows = 4", 8)
    words = ("2 devices run it together", setting) if error is OUT_OF_MEMORY else ("planted",)
    assert all(word in output for output in outputs for word in words)
    assert sizes == [rows]
    assert engine.pipeline.stats.out_of_memory == 0


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
    assert sizes == [4] * 4 * 4
    assert asks == [pipeline.device]
    engine.run(dataclasses.replace(asked[0], negative_prompt=None))
    assert len(asks) == 1
    monkeypatch.setattr(pipeline, "rows_per_forward", 3)
    sizes.clear()
    assert same(engine.run(*asked), wanted)
    assert sizes == [3, 3, 2] * 2 * 4
    assert len(asks) == 1
    assert pipeline.stats.out_of_memory == 0


def test_a_transformer_of_unknown_width_gives_no_forecast(engine, asked, monkeypatch):
    monkeypatch.setattr(engine.pipeline.transformer, "inner_dim", 64)
    monkeypatch.delattr(engine.pipeline.transformer, "inner_dim")
    monkeypatch.setattr(memory, "kept_bytes", lambda states: 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: 20)
    assert engine.pipeline.row_bytes(16, 10) == 0
    sizes = watched(engine, monkeypatch, "predict_velocity", lambda *_: None)
    engine.run(*asked)
    assert set(sizes) == {16}


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
