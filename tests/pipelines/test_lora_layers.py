"""A LoRA beside the weights, in the engine's layers as they run here."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from verl_omni.bench.random_lora import random_lora
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.harness import AdapterEngine
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest
from verl_omni.workers.rollout.staging import LoraAdapter, staged_lora

REQUESTS = [
    RolloutRequest(request_id=name, prompt=name, seed=i, height=64, width=64, num_inference_steps=3)
    for i, name in enumerate(("a red circle", "two blue squares"))
]


def large(lora: LoraAdapter, factor: float) -> LoraAdapter:
    """`lora` times `factor`, without what it adds to keys: of a packed layer only some parts have one then."""
    tensors = {
        name: tensor * factor if ".lora_B." in name else tensor
        for name, tensor in lora.tensors.items()
        if "to_k." not in name
    }
    return dataclasses.replace(lora, tensors=tensors)


@pytest.mark.engine
@pytest.mark.parametrize("fused", [False, True], ids=["stock blocks", "fused blocks"])
@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen_image", "QwenImagePipeline"), ("sd3", "StableDiffusion3Pipeline")]
)
def test_beside_the_weights_it_does_what_it_does_in_them(family, architecture, fused, request, monkeypatch):
    from vllm.lora.request import LoRARequest
    from vllm_omni.diffusion.lora.layers.base_linear import DiffusionBaseLinearLayerWithLoRA

    def slow(*_: object) -> None:
        raise AssertionError("the engine's own layer ran")

    model = request.getfixturevalue(f"tiny_{family.removesuffix('_image')}")
    config = json.loads((model / "transformer" / "config.json").read_text())
    lora = large(random_lora(config, 4, torch.float32), 100)
    with AdapterEngine(AdapterRegistry.get_class(architecture), model, RolloutMode.STEP_WISE, torch.float32) as engine:
        if fused:
            engine.pipeline.fuse()

        def images() -> torch.Tensor:
            with monkeypatch.context() as patch:  # else the engine takes out what these requests do not name
                patch.setattr(engine.worker.lora_manager, "set_active_adapter", lambda *_, **__: None)
                patch.setattr(DiffusionBaseLinearLayerWithLoRA, "apply", slow)
                outputs = engine.run(*REQUESTS)
            return torch.cat([output.trajectory_latents for output in outputs])

        without = images()
        with staged_lora(lora, engine.pipeline.lora_key_map) as folder:
            engine.worker.load_lora(LoRARequest("policy", 1, str(folder)))
            beside = images()
            engine.worker.lora_manager.set_active_adapter(None)
            assert torch.equal(images(), without)
            engine.worker.merge_lora(str(folder), 1.0)
            torch.testing.assert_close(beside, images(), rtol=1e-4, atol=1e-4)
        assert (beside - without).abs().max() > 1e-2
