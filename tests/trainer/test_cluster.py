"""What a run finds out about its cluster before anything runs there, and how it tells of what went wrong."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.test_train_settings import ROLLOUT, settings
from verl_omni.trainer.diffusion import cluster
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.replicas import RolloutReplicas

BATCH = {"data.train_batch_size": 48}


def job(device: str = "cpu", **changes) -> Any:
    return SimpleNamespace(settings=settings(**BATCH | changes), device=device, colocated=True)


def test_a_run_on_one_machine_has_a_ray_of_its_own_unless_another_is_named(monkeypatch):
    def address(**changes):
        return cluster.ray_address(settings(**BATCH | changes).trainer)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert (address(), address(trainer__nnodes=2)) == ("local", "auto")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert address() is None
    assert address(trainer__ray_kwargs={"address": "here:6379"}) == "here:6379"


def test_a_ray_that_is_not_there_is_told_with_the_key_that_asked_for_it(monkeypatch):
    import ray

    def refuse(**options):
        raise ConnectionError("nobody answers")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        ConfigError, match=r"no Ray to join \(address auto\): nobody answers; .* write trainer\.nnodes=1"
    ):
        cluster._start_ray(job(trainer__nnodes=2))


def test_only_machines_that_live_count(monkeypatch):
    import ray

    nodes = [{"Alive": alive, "Resources": {"CPU": 4.0}} for alive in (True, False)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    cluster._check_room(job(trainer__nnodes=1, trainer__n_gpus_per_node=2))
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2 .* the machines of the Ray cluster have 1 × 4; write"):
        cluster._check_room(job(trainer__nnodes=2, trainer__n_gpus_per_node=2))


def test_a_configuration_that_a_worker_refuses_comes_without_its_traceback():
    from ray.exceptions import RayTaskError

    def fail(cause):
        raise RayTaskError("init_model", "Traceback\n  a\n  b\n", cause).as_instanceof_cause()

    with pytest.raises(ConfigError) as raised:
        cluster._load(SimpleNamespace(init_model=lambda: fail(ConfigError("attn_backend='x'"))))
    assert str(raised.value) == "attn_backend='x'"
    with pytest.raises(RayTaskError, match="Traceback"):
        cluster._load(SimpleNamespace(init_model=lambda: fail(ValueError("other"))))


def test_a_start_that_takes_too_long_names_the_key_to_raise(monkeypatch):
    async def never_up(*args, start_timeout_s, **options):
        raise TimeoutError(f"not up after {start_timeout_s:g} s: server is loading a/b")

    monkeypatch.setattr(RolloutReplicas, "start", never_up)
    asked = job(**{f"{ROLLOUT}.start_timeout_s": 90})
    asked.colocated = False
    asked.setup = SimpleNamespace(plan=None, adapter_path="a.B")
    with pytest.raises(
        TrainingError, match=r"not up after 90 s: .* is loading a/b; raise .*rollout\.start_timeout_s=90 "
    ):
        asyncio.run(cluster._start_replicas(asked, SimpleNamespace(pgs=[])))
