"""Twelve requests, four for each of three prompts: the same trajectories in every mode, order and company."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.expectations import facts
from verl_omni.testing.harness import AdapterEngine, Arrival
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

pytestmark = pytest.mark.engine

PROMPTS = ["hi", "a red circle on a white background", "a blue square, and beside it many more words that make it long"]


def group(cfg_key):
    return [
        RolloutRequest(
            request_id=f"{p}-{k}",
            prompt=prompt,
            negative_prompt="blurry",
            **{cfg_key: 4.0},
            height=64,
            width=64,
            num_inference_steps=10,
            max_sequence_length=128,
            sde_window_size=2,
            sde_window_range=(0, 5),
            seed=100 * p + k,
        )
        for p, prompt in enumerate(PROMPTS)
        for k in range(4)
    ]


def same(outputs, wanted, atol):
    for a, b in zip(outputs, wanted, strict=True):
        for name in ("trajectory_latents", "trajectory_log_probs"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=atol, rtol=0)
        assert torch.equal(a.trajectory_timesteps, b.trajectory_timesteps)
        assert facts(a) == facts(b)
        assert int((a.images[0].int() - b.images[0].int()).abs().max()) <= (1 if atol else 0)


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen", "QwenImagePipeline"), ("sd3", "StableDiffusion3Pipeline")]
)
def test_modes_orders_company_and_engines_agree(request, family, architecture):
    adapter, model = AdapterRegistry.get_class(architecture), request.getfixturevalue(f"tiny_{family}")
    requests = group(adapter.cfg_key)
    with AdapterEngine(adapter, model, RolloutMode.SERIAL) as engine:
        wanted = engine.run(*requests)
    assert len({tuple(o.trajectory_latents.flatten()[:4].tolist()) for o in wanted}) == 12
    assert len({tuple(o.multimodal_output["metadata"]["rl"]["sde_window"][0]) for o in wanted}) > 1
    shuffled = random.Random(0).sample(range(12), 12)
    company = [
        dataclasses.replace(r, request_id=f"c{r.request_id}", seed=9, num_inference_steps=7) for r in requests[:4]
    ]
    for mode in (RolloutMode.REQUEST_LEVEL, RolloutMode.STEP_WISE):
        with AdapterEngine(adapter, model, mode) as engine:
            first = engine.run(*requests)
            assert max(engine.pipeline.stats.batch_sizes) == 12
            same(first, wanted, 1e-5)
            same(engine.run(*(requests[i] for i in shuffled)), [wanted[i] for i in shuffled], 1e-5)
            same(engine.run(*company, *requests)[4:], wanted, 1e-5)
    with AdapterEngine(adapter, model, mode) as engine:
        same(engine.run(*requests), first, 0)
        engine.pipeline.fuse()  # as where the transformer is compiled
        fused = {type(module).__name__ for module in engine.pipeline.transformer.modules()}
        assert {"FusedAttention", "FusedBlock", "FusedUp"} <= fused
        same(engine.run(*requests), wanted, 1e-5)


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen", "QwenImagePipeline"), ("sd3", "StableDiffusion3Pipeline")]
)
def test_a_joiner_of_a_bfloat16_model_meets_float32_latents(request, family, architecture):
    adapter, model = AdapterRegistry.get_class(architecture), request.getfixturevalue(f"tiny_{family}")
    first, second = group(adapter.cfg_key)[:2]
    with AdapterEngine(adapter, model, RolloutMode.STEP_WISE, torch.bfloat16) as engine:
        outputs = engine.run(first, Arrival(request=second, after=1))
    for output in outputs:
        latents = output.trajectory_latents
        assert latents.dtype == torch.float32
        assert not torch.equal(latents, latents.bfloat16().float())
