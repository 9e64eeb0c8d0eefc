"""Between two steps the engine touches nothing on the device, so neither waits for the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm_omni.diffusion.worker import diffusion_model_runner
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

from verl_omni.pipelines.queued import ahead_of_queue, to_device
from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout
from verl_omni.pipelines.runner import RolloutModelRunner
from verl_omni.testing.harness import AdapterEngine
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

CPU = torch.device("cpu")


def request(name: str, **knobs) -> RolloutRequest:
    return RolloutRequest(
        request_id=name, seed=1, **{"prompt": "a fox", "height": 64, "width": 64, "num_inference_steps": 2} | knobs
    )


@pytest.fixture(scope="module")
def engine(tiny_qwen):
    with AdapterEngine(QwenImageRollout, tiny_qwen, RolloutMode.STEP_WISE) as engine:
        yield engine


@pytest.mark.engine
def test_the_engine_has_no_latents_to_copy_between_steps(engine):
    results = engine.run(request("a"), request("b", num_outputs_per_prompt=2))
    assert not any(isinstance(result, Exception) for result in results)
    batch = engine.worker.model_runner.input_batch
    assert batch.latents.shape == (3, 0)
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert all(tensor.device == CPU for tensor in tensors) and sum(tensor.numel() for tensor in tensors) <= 2 * 3


@pytest.mark.engine
def test_on_one_device_nobody_is_asked_whether_a_request_could_be_prepared(engine, monkeypatch):
    def ask(failed: bool) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(diffusion_model_runner, "_dit_any_rank_failed", ask)
    good, bad, other = engine.run(request("a"), request("b", height=65), request("c", prompt="a cat"))
    assert "height=65" in str(bad) and "asked" not in str(bad)
    assert not isinstance(good, Exception) and not isinstance(other, Exception)
    assert not engine.worker.model_runner.state_cache


class Adapter(QwenImageRollout):
    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize(("pipeline", "devices"), [(nn.Module(), 1), (Adapter(), 2)], ids=["stock", "two devices"])
def test_other_pipelines_and_several_devices_are_left_to_the_stock_runner(monkeypatch, pipeline, devices):
    def prepare(self, *given):
        return [given]

    monkeypatch.setattr(DiffusionModelRunner, "_prepare_batch_inputs", prepare)
    runner = RolloutModelRunner.__new__(RolloutModelRunner)
    runner.pipeline = pipeline
    runner.od_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=devices))
    states = [SimpleNamespace(request_id="a")]
    assert runner._prepare_batch_inputs(states, ["a"]) == [(states, ["a"])]


def test_on_a_cpu_where_there_is_no_queue_both_are_what_they_would_be_without():
    given = torch.arange(3)
    torch.testing.assert_close(to_device(given, CPU), given)
    with ahead_of_queue(CPU):
        assert int(torch.ones((), device=CPU)) == 1
