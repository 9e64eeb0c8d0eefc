"""Without noise, an adapter makes the image that diffusers' own pipeline makes of the same checkpoint and seed."""

from __future__ import annotations

import diffusers
import pytest
import torch

from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.harness import AdapterEngine
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("family", "architecture", "cfg_key"),
    [("qwen", "QwenImagePipeline", "true_cfg_scale"), ("sd3", "StableDiffusion3Pipeline", "guidance_scale")],
)
def test_the_ode_image_is_the_one_of_diffusers(request, family, architecture, cfg_key):
    model = str(request.getfixturevalue(f"tiny_{family}"))
    prompt, negative, seed, steps = "a blue square on a black background", "blurry", 17, 6
    pipeline = getattr(diffusers, architecture).from_pretrained(model, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    reference = pipeline(
        prompt=prompt,
        negative_prompt=negative,
        height=96,
        width=64,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        **{cfg_key: 4.0},
    ).images
    with AdapterEngine(AdapterRegistry.get_class(architecture), model, RolloutMode.STEP_WISE) as engine:
        output = engine.run(
            RolloutRequest(
                request_id="r",
                prompt=prompt,
                negative_prompt=negative,
                height=96,
                width=64,
                num_inference_steps=steps,
                seed=seed,
                noise_level=0.0,
                **{cfg_key: 4.0},
            )
        )[0]
    difference = output.images[0].float() - reference * 255
    assert float(difference.abs().max()) < 1.01
    assert float(output.images[0].float().std()) > 1
