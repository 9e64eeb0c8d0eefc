"""What a run finds out about its cluster before anything runs there, and how it tells of what went wrong."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.test_train_settings import ROLLOUT, settings
from verl_omni.testing.tiny_training import overrides
from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion import cluster
from verl_omni.trainer.diffusion import job as job_module
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.trainer.diffusion.ray_join import check_answers
from verl_omni.trainer.main_diffusion import CONFIG_NAME
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
    async def never_up(*args, start_timeout_s, result_timeout_s, sync_timeout_s, **options):
        assert (result_timeout_s, sync_timeout_s) == (60, 1800)
        raise TimeoutError(f"not up after {start_timeout_s:g} s: server is loading a/b")

    monkeypatch.setattr(RolloutReplicas, "start", never_up)
    asked = job(**{f"{ROLLOUT}.start_timeout_s": 90, f"{ROLLOUT}.result_timeout_s": 60})
    asked.colocated = False
    asked.setup = SimpleNamespace(plan=None, adapter_path="a.B")
    with pytest.raises(
        TrainingError, match=r"not up after 90 s: .* is loading a/b; raise .*rollout\.start_timeout_s=90 "
    ):
        asyncio.run(cluster._start_replicas(asked, SimpleNamespace(pgs=[])))


@pytest.mark.parametrize(("address", "dashboard"), [("local", {"include_dashboard": False}), ("auto", {})])
def test_a_ray_of_its_own_has_no_dashboard(monkeypatch, address, dashboard):
    import ray

    started = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    cluster._start_ray(job(trainer__ray_kwargs={"address": address}))
    assert {key: value for key, value in started[0].items() if key == "include_dashboard"} == dashboard


def test_a_ray_of_its_own_answers_to_this_run_alone(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    cluster.prepare_process("cpu", own_ray=True)
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster.prepare_process("cpu", own_ray=True)
    assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ


def test_a_run_takes_the_token_only_for_a_ray_that_it_starts(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(job_module, "prepare_process", lambda device, own_ray: asked.append(own_ray))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    for address in (None, "10.0.0.1:6379"):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if address is not None:
            monkeypatch.setenv("RAY_ADDRESS", address)
        job_module.TrainingJob.prepare(compose(overrides(tmp_path, tmp_path), CONFIG_NAME))
    assert asked == [True, False]


def test_tokens_are_not_among_what_ray_passes_on_and_logs(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_hush")
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    passed = cluster._environment()
    assert passed["HF_HOME"] == "/somewhere"
    assert not {"HF_TOKEN", "VLLM_API_KEY", "RAY_AUTH_TOKEN"} & passed.keys()


def test_workers_of_one_machine_meet_in_a_file_and_others_at_a_port(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    place = tmp_path / "meeting"
    alone = cluster._rendezvous(settings(**BATCH).trainer, place)
    assert alone["DIST_INIT_METHOD"] == f"file://{place}"
    assert alone.get("GLOO_SOCKET_IFNAME", "lo") == "lo"
    assert cluster._rendezvous(settings(**BATCH, trainer__nnodes=2).trainer, place) == {}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster._rendezvous(settings(**BATCH).trainer, place) == {}


@pytest.mark.parametrize("address", ["local", "auto", "anyscale://somewhere"])
def test_what_ray_finds_by_itself_is_not_waited_for(address):
    check_answers(address, limit_s=0)


@pytest.mark.parametrize(
    ("scheme", "listens", "message"),
    [
        ("", False, r"nothing listens there, waited 0\.3 s"),
        ("ray://", False, r"nothing listens there, waited 0\.3 s"),
        ("", True, r"what listens there did not answer as Ray does within 0\.3 s"),
    ],
)
def test_a_cluster_that_does_not_answer_is_waited_for_with_a_limit(monkeypatch, scheme, listens, message):
    import ray

    def never(**options):
        raise AssertionError("Ray would wait by itself")

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        address = f"{scheme}127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(cluster, "check_answers", lambda address: check_answers(address, limit_s=0.3))
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", never)
        with pytest.raises(ConfigError, match=rf"no Ray to join \(address {address}\): {message}.*ray start"):
            cluster._start_ray(job())


def test_what_is_no_address_is_told():
    with pytest.raises(ConnectionError, match="'nowhere' is no address; write host:port"):
        check_answers("nowhere")
