"""A step that fails over several requests, wherever in it, loses none of them and changes no value."""

from __future__ import annotations

import pytest
import torch

from verl_omni.pipelines import media, rows, transfer
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.harness import AdapterEngine
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

pytestmark = pytest.mark.engine

FAMILIES = [
    ("qwen", "QwenImagePipeline", RolloutMode.REQUEST_LEVEL),
    ("sd3", "StableDiffusion3Pipeline", RolloutMode.STEP_WISE),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: f"{p[0]}-{p[2]}")
def engine(request):
    family, architecture, mode = request.param
    model = request.getfixturevalue(f"tiny_{family}")
    with AdapterEngine(AdapterRegistry.get_class(architecture), model, mode) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests(engine):
    knobs = {"prompt": "a red circle", "height": 64, "width": 64, "sde_window_size": 2}
    return [
        RolloutRequest(request_id=f"r{seed}", seed=seed, num_inference_steps=3 + seed % 2, **knobs) for seed in range(5)
    ]


@pytest.fixture(scope="module")
def undisturbed(engine, requests):
    return engine.run(*requests)


def once(function, error, *, when=lambda *args: True):
    """`function`, that raises `error` at the second call for which `when` holds."""
    calls = iter([False, True])

    def called(*args, **kwargs):
        if when(*args) and next(calls, False):
            raise error
        return function(*args, **kwargs)

    return called


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("gather", torch.OutOfMemoryError("full")),
        ("velocity", SystemExit("stop")),
        ("noise and step", torch.OutOfMemoryError("full")),
        ("finite", ValueError("odd")),
        ("host", torch.OutOfMemoryError("full")),
    ],
    ids=str,
)
def test_the_others_finish_as_if_nothing_had_happened(monkeypatch, engine, requests, undisturbed, place, error):
    pipeline = engine.pipeline
    if place == "gather":
        monkeypatch.setattr(pipeline, "gather", once(pipeline.gather, error, when=lambda states: len(states) > 1))
    elif place == "velocity":
        monkeypatch.setattr(pipeline, "guided_velocity", once(pipeline.guided_velocity, error))
    elif place == "noise and step":
        monkeypatch.setattr(rows, "sde_step", once(rows.sde_step, error))
    elif place == "finite":
        monkeypatch.setattr(media.torch, "isfinite", once(torch.isfinite, error))
    else:
        monkeypatch.setattr(transfer, "_to_host", once(transfer._to_host, error))
    outputs = engine.run(*requests)
    for output, wanted in zip(outputs, undisturbed, strict=True):
        assert not isinstance(output, Exception), output
        torch.testing.assert_close(output.trajectory_latents, wanted.trajectory_latents, atol=1e-5, rtol=0)
        torch.testing.assert_close(output.trajectory_log_probs, wanted.trajectory_log_probs, atol=1e-5, rtol=0)
        assert int((output.images[0].int() - wanted.images[0].int()).abs().max()) <= 1


def test_a_prompt_is_encoded_again_where_the_memory_was_short(monkeypatch, engine, requests, undisturbed):
    pipeline = engine.pipeline
    pipeline.release()
    pipeline.read_stats(reset=True)
    full = torch.OutOfMemoryError("full")
    calls = iter([True])

    def encode(*args):
        if next(calls, False):
            raise full
        return type(pipeline).encode(pipeline, *args)

    monkeypatch.setattr(pipeline, "encode", encode)
    outputs = engine.run(*requests)
    assert all(
        torch.equal(a.trajectory_latents, b.trajectory_latents) for a, b in zip(outputs, undisturbed, strict=True)
    )
    assert pipeline.read_stats().out_of_memory == 1


def test_what_fails_alone_too_ends_with_its_error_and_nothing_else_does(monkeypatch, engine, requests, undisturbed):
    gather = engine.pipeline.gather

    def picky(states):
        if any(state.request_id.startswith("r3") for state in states):
            raise ValueError("not this one")
        return gather(states)

    monkeypatch.setattr(engine.pipeline, "gather", picky)
    outputs = engine.run(*requests)
    assert [isinstance(output, Exception) for output in outputs] == [False, False, False, True, False]
    assert "not this one" in str(outputs[3])
    torch.testing.assert_close(outputs[4].trajectory_latents, undisturbed[4].trajectory_latents, atol=1e-5, rtol=0)
