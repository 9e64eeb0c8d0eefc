"""The random LoRA, several engines as one, and the counter of host syncs."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from verl_omni.bench import servers
from verl_omni.bench.full_size import TRANSFORMER
from verl_omni.bench.random_lora import random_lora
from verl_omni.bench.servers import Servers
from verl_omni.bench.workload import Workload
from verl_omni.pipelines.host_syncs import HostSyncs
from verl_omni.pipelines.worker_extension import RolloutWorkerExtension
from verl_omni.workers.config.lora import check_lora_adapter
from verl_omni.workers.rollout.handle import Placement
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest

SMALL = {"num_layers": 2, "num_attention_heads": 1, "joint_attention_dim": 32}
EXPECTED = {
    "qwen_image": "attn.add_k_proj attn.add_q_proj attn.add_v_proj attn.to_add_out attn.to_k attn.to_out.0 attn.to_q "
    "attn.to_v img_mlp.net.0.proj img_mlp.net.2 txt_mlp.net.0.proj txt_mlp.net.2",
    "sd3": "attn.add_k_proj attn.add_q_proj attn.add_v_proj attn.to_add_out attn.to_k attn.to_out.0 attn.to_q "
    "attn.to_v attn2.to_k attn2.to_out.0 attn2.to_q attn2.to_v ff.net.0.proj ff.net.2 ff_context.net.0.proj "
    "ff_context.net.2",
}


@pytest.mark.parametrize("family", ["qwen_image", "sd3"])
def test_a_random_lora_is_on_all_linear_layers_of_the_blocks_but_modulation(family: str):
    own = {"dual_attention_layers": [0], "caption_projection_dim": 64} if family == "sd3" else {}
    lora = random_lora({**TRANSFORMER[family], **SMALL, **own}, 4, torch.bfloat16)
    check_lora_adapter(lora.config, lora.tensors, "it")
    first = "base_model.model.transformer_blocks.0."
    names = {name.removeprefix(first).split(".lora_")[0] for name in lora.tensors if name.startswith(first)}
    assert sorted(names) == EXPECTED[family].split()
    width = TRANSFORMER[family]["attention_head_dim"]
    a, b = (lora.tensors[f"{first}attn.to_q.lora_{half}.weight"] for half in "AB")
    assert a.shape == (4, width) and b.shape == (width, 4) and a.dtype == torch.bfloat16
    assert 0 < b.abs().max() < 0.01


class Replicas:
    """Stands for running servers: keeps the groups that it gets, and fails every request."""

    def __init__(self) -> None:
        self.groups: list[list[RolloutRequest]] = []
        self.synced: list[tuple[str, int]] = []

    async def generate_groups(self, groups: list[list[RolloutRequest]]) -> AsyncGenerator[RolloutError, None]:
        self.groups += groups
        for group in groups:
            for request in group:
                yield RolloutError(request.request_id, "no")

    async def sync(self, kind: str, version: int, payload: object) -> None:
        self.synced.append((kind, version))


async def test_several_engines_get_whole_groups_and_each_lora_under_a_version_of_its_own():
    several = Servers(replicas := Replicas())  # type: ignore[arg-type]
    requests = Workload(height=64, width=64, steps=2, n=2).requests(6, "a")
    assert len([result async for result in several.generate_all(requests)]) == 6
    assert replicas.groups == [requests[:2], requests[2:4], requests[4:]]
    with pytest.raises(RolloutError, match="no"):
        await several.generate(requests[0])
    lora = random_lora({**TRANSFORMER["qwen_image"], **SMALL}, 2, torch.float32)
    await several.load_lora(lora)
    await several.load_lora(lora)
    assert replicas.synced == [("lora", 1), ("lora", 2)]


@pytest.mark.parametrize(("cuda", "running"), [(False, False), (True, False), (False, True)])
async def test_each_server_has_a_gpu_where_there_are_some_and_ray_is_started_unless_it_runs(monkeypatch, cuda, running):
    async def start(settings: object, placements: list[Placement]) -> Replicas:
        started.append((settings, placements))
        return Replicas()

    started: list[tuple[object, list[Placement]]] = []
    rays: list[dict[str, Any]] = []
    prepared: list[tuple[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(servers, "prepare_process", lambda device, *, own_ray: prepared.append((device, own_ray)))
    monkeypatch.setattr(servers.RolloutReplicas, "start", start)
    monkeypatch.setattr("ray.is_initialized", lambda: running)
    monkeypatch.setattr("ray.init", lambda **given: rays.append(given))
    settings: Any = object()
    servers.prepare_for_ray()
    await Servers.start(settings, 300)
    assert started == [(settings, [Placement(num_cpus=0, num_gpus=int(cuda))] * 300)]
    assert prepared == [("cuda" if cuda else "cpu", True)]
    assert [ray["address"] for ray in rays] == ([] if running else ["local"])


def wait() -> None:
    """Wait for the device, as torch tells it."""
    warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)


class Waiting(nn.Module):
    """A pipeline whose step waits for the device `waits` times."""

    def denoise_step(self, waits: int, *, states: None = None) -> int:
        for _ in range(waits):
            wait()
        warnings.warn("something else", UserWarning, stacklevel=1)
        return waits


class Worker:
    """A worker that waits once before the step, and serves a batch of one as one request."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(pipeline=Waiting())

    def execute_stepwise(self, waits: int) -> int:
        wait()
        return self.model_runner.pipeline.denoise_step(waits, states=None)

    execute_model = execute_stepwise

    def execute_model_batch(self, waits: int) -> int:
        return self.execute_model(waits)


def test_waits_in_and_around_the_denoising_step_are_counted_until_counting_stops():
    worker = Worker()
    syncs = HostSyncs(worker)
    syncs.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [worker.execute_stepwise(2), worker.execute_model(0), worker.execute_model_batch(3)] == [2, 0, 3]
    assert syncs.stop() == {"syncs": 3 + 1 + 4, "steps": 3}
    with pytest.warns(UserWarning, match="called|else") as told:
        worker.execute_stepwise(1)
    assert len(told) == 3 and syncs.syncs == 8 and syncs.steps == 3


def test_a_step_that_fails_is_counted_too():
    syncs = HostSyncs(worker := Worker())
    syncs.start()
    with pytest.raises(TypeError):
        worker.execute_stepwise("two")  # type: ignore[arg-type]
    assert syncs.stop() == {"syncs": 1, "steps": 1}


def test_the_worker_counts_host_syncs_when_it_is_told_to():
    worker: Any = Worker()
    assert RolloutWorkerExtension.count_host_syncs(worker, True) == {}
    assert worker.execute_stepwise(0) == 0
    assert RolloutWorkerExtension.count_host_syncs(worker, False) == {"syncs": 1, "steps": 1}
