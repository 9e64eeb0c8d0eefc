"""A LoRA beside the weights, in the engine's layers as they run here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

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


def scaled(lora: LoraAdapter, factor: float, *leaves: str) -> LoraAdapter:
    """`lora` times `factor`, on the layers alone whose names end in one of `leaves`."""
    tensors = {
        name: tensor * factor if ".lora_B." in name else tensor
        for name, tensor in lora.tensors.items()
        if name.partition(".lora_")[0].endswith(leaves)
    }
    return dataclasses.replace(lora, tensors=tensors)


@contextmanager
def loaded(engine: AdapterEngine, lora: LoraAdapter, version: int) -> Iterator[str]:
    """Beside the weights; the folder that it came from."""
    from vllm.lora.request import LoRARequest

    with staged_lora(lora, engine.pipeline.lora_key_map) as folder:
        engine.worker.load_lora(LoRARequest(f"policy-{version}", version, str(folder)))
        yield str(folder)


def stock_gelu(architecture: str) -> type[nn.Module]:
    from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import ColumnParallelApproxGELU
    from vllm_omni.diffusion.models.sd3.sd3_transformer import GELU

    return ColumnParallelApproxGELU if architecture == "QwenImagePipeline" else GELU


@pytest.mark.engine
@pytest.mark.parametrize("fused", [False, True], ids=["stock blocks", "fused blocks"])
@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen", "QwenImagePipeline"), ("sd3", "StableDiffusion3Pipeline")]
)
def test_beside_the_weights_it_does_what_it_does_in_them(family, architecture, fused, request, monkeypatch):
    from vllm_omni.diffusion.lora.layers.base_linear import DiffusionBaseLinearLayerWithLoRA

    def stock_ran(*_: Any) -> None:
        raise AssertionError("the engine's own layer ran")

    model = request.getfixturevalue(f"tiny_{family}")
    config = json.loads((model / "transformer" / "config.json").read_text())
    first = scaled(random_lora(config, 4, torch.float32), 100, "to_q")
    # Of the packed q, k and v, k has none; the rank is another, so the engine replaces its buffers.
    second = scaled(random_lora(config, 12, torch.float32), 100, "to_q", "to_v", "to_out.0", "proj", "net.2")
    with AdapterEngine(AdapterRegistry.get_class(architecture), model, RolloutMode.STEP_WISE, torch.float32) as engine:
        if fused:
            engine.pipeline.fuse()

        def trajectories() -> torch.Tensor:
            with monkeypatch.context() as patch:
                # Else the engine takes out what these requests do not name.
                patch.setattr(engine.worker.lora_manager, "set_active_adapter", lambda *_, **__: None)
                patch.setattr(DiffusionBaseLinearLayerWithLoRA, "apply", stock_ran)
                if fused:
                    patch.setattr(stock_gelu(architecture), "forward", stock_ran)
                outputs = engine.run(*REQUESTS)
            return torch.cat([output.trajectory_latents for output in outputs])

        without = trajectories()
        with loaded(engine, first, 1):
            assert (trajectories() - without).abs().max() > 1e-2
        with loaded(engine, second, 2) as folder:
            beside = trajectories()
            engine.worker.lora_manager.set_active_adapter(None)
            assert torch.equal(trajectories(), without)
            engine.worker.merge_lora(folder, 1.0)
            torch.testing.assert_close(beside, trajectories(), rtol=1e-4, atol=1e-4)
        assert (beside - without).abs().max() > 1e-2
