"""What the engine is started with, and what it is kept from logging."""

import importlib.util
import logging
import multiprocessing
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch.distributed as dist

from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.rollout.launch import (
    _REQUEST_ERRORS,
    drop_request_errors,
    engine_arguments,
    launch,
    own_rendezvous,
)
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan

PLAN = RolloutPlan(
    mode=RolloutMode.STEP_WISE,
    max_num_seqs=4,
    request_batch_max_wait_ms=0.0,
    rows_per_forward=2,
    reason="the test says so",
)


def arguments(executor: str | None = None, masks_text: bool = True, **engine_kwargs):
    return engine_arguments(
        PLAN, adapter="a.B", dtype="float32", executor=executor, engine_kwargs=engine_kwargs, masks_text=masks_text
    )


def on_gpu(monkeypatch, *, major, cuda=True):
    """As on a GPU of this major capability, with no backend named in the environment."""
    capability = SimpleNamespace(major=major)
    platform = SimpleNamespace(is_cuda=lambda: cuda, get_device_capability=lambda: capability)
    monkeypatch.setattr("vllm.platforms.current_platform", platform, raising=False)
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)


def test_engine_arguments_follow_the_plan_exactly():
    got = arguments(max_num_seqs=4, dtype="float32", rows_per_forward=2, enable_sleep_mode=True, vae_use_tiling=None)
    assert got["step_execution"] is True and got["max_num_seqs"] == 4 and got["enable_sleep_mode"] is True
    assert got["custom_pipeline_args"] == {"pipeline_class": "a.B", "rows_per_forward": 2}
    assert "rows_per_forward" not in got and "vae_use_tiling" not in got


@pytest.mark.parametrize(
    ("engine_kwargs", "message"),
    [
        ({"max_num_seqs": 8}, "max_num_seqs=8, but the plan says 4"),
        ({"rows_per_forward": 8}, "rows_per_forward=8, but the plan says 2"),
        ({"engine_backend": "default"}, "engine_backend='default', but"),
    ],
)
def test_what_contradicts_the_plan_is_refused(engine_kwargs, message):
    with pytest.raises(ValueError, match=message):
        arguments(**engine_kwargs)


@pytest.mark.parametrize(
    ("masks_text", "flash", "expected"),
    [
        (True, True, "CUDNN_ATTN"),
        (True, False, "CUDNN_ATTN"),
        (False, True, "FLASH_ATTN"),
        (False, False, "CUDNN_ATTN"),
    ],
)
def test_on_a_hopper_flash_attention_3_attends_where_no_text_is_masked_and_cudnn_elsewhere(
    monkeypatch, masks_text, flash, expected
):
    on_gpu(monkeypatch, major=9)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if flash else None)
    assert arguments(masks_text=masks_text)["diffusion_attention_backend"] == expected


@pytest.mark.parametrize(
    ("cuda", "major", "variable", "engine_kwargs", "expected"),
    [
        (True, 10, None, {}, None),
        (False, 9, None, {}, None),
        (True, 9, "TORCH_SDPA", {}, None),
        (True, 9, None, {"diffusion_attention_backend": "FLASH_ATTN"}, "FLASH_ATTN"),
    ],
)
def test_elsewhere_and_where_a_backend_is_named_attention_is_left_alone(
    monkeypatch, cuda, major, variable, engine_kwargs, expected
):
    on_gpu(monkeypatch, major=major, cuda=cuda)
    if variable is not None:
        monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", variable)
    assert arguments(**engine_kwargs).get("diffusion_attention_backend") == expected


def test_a_key_that_the_engine_would_drop_is_refused():
    with pytest.raises(ConfigError, match=r"enforce_eagre .*enforce_eager\?"):
        arguments(enforce_eagre=True)


@pytest.mark.parametrize(
    ("engine_kwargs", "expected"),
    [
        ({}, "uni"),
        ({"num_gpus": 1, "tensor_parallel_size": 1, "ulysses_degree": None, "hsdp_shard_size": -1}, "uni"),
        ({"vae_use_slicing": True, "num_weight_load_threads": 4}, "uni"),
        ({"parallel_config": {"tensor_parallel_size": 1}}, "uni"),
        ({"num_gpus": 2}, "mp"),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": "2"}, "mp"),
        ({"cfg_parallel_size": 2}, "mp"),
        ({"data_parallel_size": 2}, "mp"),
        ({"vae_patch_parallel_size": 2}, "mp"),
        ({"ulysses_degree": 2}, "mp"),
        ({"ring_degree": 2, "ulysses_degree": 1}, "mp"),
        ({"text_encoder_tp_size": 2}, "mp"),
        ({"use_hsdp": True, "hsdp_shard_size": 2}, "mp"),
        ({"parallel_config": {"tensor_parallel_size": 2}}, "mp"),
        ({"distributed_executor_backend": "mp"}, "mp"),
        ({"distributed_executor_backend": None}, "uni"),
    ],
)
def test_one_device_is_driven_from_this_process_and_several_from_their_own(engine_kwargs, expected):
    assert arguments(**engine_kwargs)["distributed_executor_backend"] == expected


def test_the_executor_that_was_asked_for_is_taken():
    assert arguments("mp")["distributed_executor_backend"] == "mp"
    assert arguments("uni", tensor_parallel_size=2)["distributed_executor_backend"] == "uni"  # the engine refuses it


INLINE, RUNNER, OMNI = _REQUEST_ERRORS
DROPPED = [
    (INLINE, "Diffusion request %s failed: %s"),
    (RUNNER, "Stepwise request preparation failed for %s: %s"),
    (RUNNER, "Stepwise per-request error for %s: %s"),
    (OMNI, "[AsyncOmni] Orchestrator error for req=%s stage-%s: %s"),
]
KEPT = [
    (INLINE, "[InlineStageDiffusionClient] stage-%s [rep-%s] diffusion executor died unexpectedly."),
    (INLINE, "Diffusion request %s timed out"),
    (RUNNER, "Stepwise mode is off"),
    (RUNNER, "the forward failed: Diffusion request %s failed: %s"),
    (OMNI, "[AsyncOmni] Engine dead: %s"),
    (OMNI, "[AsyncOmni] final_output_loop failed."),
    ("verl_omni.pipelines.model_base", "request %s failed"),
    *[(f"vllm_omni.{name}", message) for _, message in DROPPED for name in ("diffusion", "some.other.module")],
]


def test_only_what_the_engine_says_of_one_failed_request_is_dropped():
    drop_request_errors()
    drop_request_errors()  # as the next engine of this process does

    def passes(name: str, message: str) -> bool:
        log = logging.getLogger(name)
        return bool(log.filter(log.makeRecord(name, logging.ERROR, "file", 1, message, ("r", 0, "x"), None)))

    assert [message for name, message in DROPPED if passes(name, message)] == []
    assert [(name, message) for name, message in KEPT if not passes(name, message)] == []
    assert all(len(logging.getLogger(name).filters) == 1 for name in _REQUEST_ERRORS)


@pytest.mark.parametrize(("name", "message"), DROPPED)
def test_the_installed_engine_says_it_in_these_words(name, message):
    root = Path(importlib.util.find_spec("vllm_omni").submodule_search_locations[0])
    source = root.joinpath(*name.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
    assert f'"{message}"' in source


def test_the_ports_of_engines_that_start_at_once_are_their_own():
    with ExitStack() as starting:
        ports = [(starting.enter_context(own_rendezvous()), os.environ["MASTER_PORT"])[1] for _ in range(4)]
        stores = [dist.TCPStore("localhost", int(port), world_size=1, is_master=True) for port in ports]
        assert len({store.port for store in stores}) == 4


class Hangs:
    """An engine whose worker never says that it is ready."""

    def __init__(self, *, model, init_timeout, **options):
        self.workers.append(multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True))
        self.workers[0].start()
        raise TimeoutError(f"Orchestrator did not become ready within {init_timeout}s")

    workers: ClassVar[list[multiprocessing.Process]] = []


def test_a_start_that_hangs_ends_with_its_processes(monkeypatch):
    monkeypatch.setattr("verl_omni.workers.rollout.launch.import_engine", lambda: Hangs)
    with pytest.raises(TimeoutError, match=r"not up after 90 s, it was loading a/b; raise .*rollout\.start_timeout_s"):
        launch("a/b", arguments("mp", init_timeout=90))
    assert Hangs.workers[0].exitcode == -signal.SIGKILL


def test_a_start_has_as_long_as_the_configuration_says():
    assert arguments()["init_timeout"] == DiffusionRolloutConfig.start_timeout_s
    assert arguments(init_timeout=90)["init_timeout"] == 90


def test_the_port_of_a_starting_engine_is_its_own(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("RANK", raising=False)
    with own_rendezvous(), own_rendezvous():  # of two engines that start at the same time
        port = int(os.environ["MASTER_PORT"])
        os.environ["RANK"] = "0"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert dist.TCPStore("localhost", port, world_size=1, is_master=True).port == port
    assert os.environ["MASTER_PORT"] == "1"
    assert "RANK" not in os.environ
