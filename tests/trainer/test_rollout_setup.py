"""What a run settles about its rollouts from a measured profile: the key it looks up and the device's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_omni.testing.tiny_training import overrides
from verl_omni.trainer import rollout_setup
from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion.job import TrainingJob
from verl_omni.trainer.main_diffusion import CONFIG_NAME
from verl_omni.trainer.rollout_setup import device_memory_gib, device_name, resolve_rollout
from verl_omni.workers.config import ConfigError, DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.profile import ProfileKey, ProfilePoint, RolloutProfile
from verl_omni.workers.rollout.request import RolloutRequest

GUIDED = [RolloutRequest(request_id="a", prompt="a cat", negative_prompt=" ")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    (folder / "transformer/config.json").write_text(json.dumps({"_class_name": "QwenImageTransformer2DModel"}))
    return folder


@pytest.fixture
def resolve(model: Path, tmp_path: Path):
    """The plan of a run on `model`, with the profiles in a folder."""

    def run(trained_lora_rank: int | None = None, lora_path: Path | None = None, **keys: Any) -> RolloutPlan:
        ours = DiffusionModelConfig(path=str(model), lora_path=lora_path and str(lora_path))
        rollout = DiffusionRolloutConfig(batching_mode="auto", profile=str(tmp_path / "profiles"), **keys)
        return resolve_rollout(ours, rollout, GUIDED, trained_lora_rank=trained_lora_rank).plan

    (tmp_path / "profiles").mkdir()
    return run


def save(model: Path, name: str, request_level: float, **changes: Any) -> None:
    """A profile in which step-wise makes 1 image/s, and takes 10 GiB."""
    key = ProfileKey.of(DiffusionRolloutConfig(), model=model, device=device_name(), cfg=True)
    points = (
        ProfilePoint(mode="step_wise", max_num_seqs=8, images_per_s=1.0, peak_memory_gib=10.0),
        ProfilePoint(mode="request_level", max_num_seqs=8, images_per_s=request_level, peak_memory_gib=60.0),
    )
    RolloutProfile(key=replace(key, **changes), points=points).save(model.parent / "profiles" / f"{name}.json")


def test_a_run_takes_the_profile_of_its_folder_that_was_measured_with_its_lora(resolve, model, tmp_path):
    from safetensors.torch import save_file

    save(model, "none", 0.1)
    save(model, "rank_8", 2.0, lora_rank=8)
    save(model, "rank_8_merged", 3.0, lora_rank=8, lora_merged=True)
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 8}))
    save_file({"to_q.lora_A.weight": torch.zeros(8, 4)}, lora / "adapter_model.safetensors")
    assert "step_wise is fastest" in resolve().reason
    assert "request_level 2 images/s" in resolve(lora_path=lora).reason
    assert "request_level 2 images/s" in resolve(trained_lora_rank=8).reason
    assert "request_level 3 images/s" in resolve(trained_lora_rank=8, merge_lora=True).reason
    assert "step_wise is fastest" in resolve(trained_lora_rank=0).reason
    (note,) = resolve(trained_lora_rank=16).notes
    assert "the profile none.json is stale and not used (lora_rank: measured with 0, now 16)" in note
    (lora / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lora_path: .* has r=None in its config; r must be an integer"):
        resolve(lora_path=lora)


def test_a_training_run_looks_up_the_lora_that_it_trains(model, tmp_path):
    (tmp_path / "profiles").mkdir()
    save(model, "none", 0.1)
    given = ["rollout.batching_mode=auto", f"rollout.profile={tmp_path / 'profiles'}", "model.lora_rank=16"]
    notes = TrainingJob.prepare(compose(overrides(tmp_path, model, *given), CONFIG_NAME)).setup.plan.notes
    assert any("lora_rank: measured with 0, now 16" in note for note in notes)


def test_a_profile_is_held_against_the_memory_of_the_device(resolve, model, monkeypatch):
    save(model, "measured", 2.0)
    for memory, mode in ((None, RolloutMode.REQUEST_LEVEL), (80.0, RolloutMode.REQUEST_LEVEL), (40.0, "step_wise")):
        monkeypatch.setattr(rollout_setup, "device_memory_gib", lambda memory=memory: memory)
        assert resolve().mode == mode


def test_the_memory_is_all_that_the_device_has_and_unknown_on_a_cpu(monkeypatch):
    from vllm_omni.platforms import current_omni_platform

    monkeypatch.setattr(type(current_omni_platform), "is_cuda_alike", lambda self: False)
    assert device_memory_gib() is None
    monkeypatch.setattr(type(current_omni_platform), "is_cuda_alike", lambda self: True)
    monkeypatch.setattr(type(current_omni_platform), "get_device_total_memory", lambda self: 3 * 2**30, raising=False)
    assert device_memory_gib() == 3.0


def test_an_empty_folder_of_profiles_is_an_error(resolve):
    with pytest.raises(ConfigError, match=r"the folder holds no profile"):
        resolve()
