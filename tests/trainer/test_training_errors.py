"""A configuration that can't be ends in one readable line, before Ray or a model starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from verl_omni.testing.tiny_training import overrides
from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion.job import TrainingJob
from verl_omni.trainer.main_diffusion import CONFIG_NAME, main
from verl_omni.workers.config import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """As much of a checkpoint as is looked at before it is loaded."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.max_num_seq=8", r"rollout\.max_num_seq is not a known key; did you mean .*max_num_seqs"),
        ("trainer.total_epoch=1", r"trainer\.total_epoch is not a known key; did you mean trainer\.total_epochs"),
        ("data.train_files=missing.txt", r"data\.train_files: there is no file missing\.txt"),
        ("data.train_batch_size=5", r"data\.train_batch_size=5 is more than the 4 prompts"),
        ("rollout.n=1", r"rollout\.n=1 leaves nothing to compare"),
        ("trainer.n_gpus_per_node=3", r"cannot be shared evenly by 3 training processes"),
        ("rollout.pipeline.height=null", r"pipeline\.height=null"),
        ("reward.custom_reward_function.path=missing.py", r"reward\.custom_reward_function: .*missing\.py"),
        ("reward.scorers.color.type=colour", r"reward\.scorers\.color\.type='colour'.*color"),
        ("reward.scorers.text={type:ocr}", r"prompts\.txt:1: .* has no text in quotes"),
        ("trainer.resume_mode=nowhere", r"resume_mode='nowhere' is no checkpoint folder"),
        ("trainer.default_local_dir=/dev/null/run", r"default_local_dir='/dev/null/run': /dev/null is in the way"),
        ("trainer.default_local_dir=" + "a" * 300, r"trainer\.default_local_dir='aaa.*too long"),
        ("data.val_files=" + "a" * 300 + ".txt", r"data\.val_files='aaa.*too long"),
        ("model.path=" + "a" * 300, r"model\.path='aaa.*too long"),
        ("trainer.resume_mode=" + "a" * 300, r"trainer\.resume_mode='aaa.*too long"),
        ("rollout.metrics_port=70000", r"rollout\.metrics_port=70000 must be at most 65535"),
        (
            "rollout.batching_mode=step_wise rollout.engine_kwargs.vllm_omni.step_execution=false",
            r"step_execution",
        ),
        ("actor.diffusion_loss.loss_mode=flow_gpro", r"loss_mode='flow_gpro'.*flow_grpo"),
        ("algorithm.adv_estimator=best", r"adv_estimator='best'.*flow_grpo"),
        ("model.algorithm=unheard_of", r"no rollout adapter .* with algorithm 'unheard_of'"),
        ("model.path=/nowhere", r"model\.path='/nowhere' is no folder"),
    ],
)
def test_one_line_tells_what_to_change(change, message, model, tmp_path, capfd):
    assert main(overrides(tmp_path, model, *change.split())) == 2
    told = capfd.readouterr().err.strip().splitlines()
    assert len([line for line in told if line.startswith("config error:")]) == 1
    assert told[-1].startswith("config error:")
    assert re.search(message, told[-1]), told[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_a_device_that_is_not_there(model, tmp_path, capfd):
    assert main([*overrides(tmp_path, model), "trainer.device=cuda"]) == 2
    assert "trainer.device=cuda, but no CUDA device is there" in capfd.readouterr().err


USERS_MODULE = """
from verl_omni.trainer.diffusion.diffusion_algos import register_diffusion_adv_est, register_diffusion_loss

@register_diffusion_loss("mine")
class Loss:
    def compute_loss(self, **given):
        ...

@register_diffusion_adv_est("mine")
def estimate(rewards, index, **given):
    ...
"""


def test_a_users_own_loss_and_advantages_are_found(model, tmp_path):
    module = tmp_path / "users_algorithms.py"
    module.write_text(USERS_MODULE)
    own = ["actor.diffusion_loss.loss_mode=mine", "algorithm.adv_estimator=mine", f"rollout.external_lib={module}"]
    config = compose(overrides(tmp_path, model, *own), CONFIG_NAME)
    assert TrainingJob.prepare(config).settings.algorithm.adv_estimator == "mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.n_gpus_per_node=4"], "takes 4 GPUs for training, but this machine shows 2"),
        (["rollout.colocate=false", "trainer.n_gpus_per_node=2"], "takes 2 GPUs for training and 2 for rollouts"),
        (["rollout.replicas=3", "trainer.n_gpus_per_node=2"], "colocate=false for GPUs of their own"),
        (["rollout.gpus_per_replica=2", "trainer.n_gpus_per_node=2"], "colocate=false for GPUs of their own"),
    ],
)
def test_more_gpus_than_there_are(settings, message, model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    arguments = [item for item in overrides(tmp_path, model, *settings) if item != "trainer.device=cpu"]
    assert main(arguments) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "folder"), [("metrics.jsonl", True), ("run.json", True), ("report.html", True), ("validation", False)]
)
def test_what_lies_where_the_run_will_write_is_told_before_anything_starts(model, tmp_path, capfd, name, folder):
    (tmp_path / "run").mkdir()
    place = tmp_path / "run" / name
    place.mkdir() if folder else place.touch()
    assert main(overrides(tmp_path, model)) == 2
    assert f"{place} is in the way; give another folder" in capfd.readouterr().err
    place.rmdir() if folder else place.unlink()
    place.symlink_to(tmp_path)
    assert main(overrides(tmp_path, model)) == 2
    assert re.search("(is in the way|is a link to .*, outside the folder)", capfd.readouterr().err)


def test_a_row_of_another_type_is_told_before_anything_starts(model, tmp_path, capfd):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b", "seed": "many"}\n')
    assert main(overrides(tmp_path, model, f"data.train_files={rows}", "data.train_batch_size=2")) == 2
    assert "rows.jsonl:2: seed must be an integer, got 'many'" in capfd.readouterr().err


def test_a_folder_name_with_nul_is_a_bad_configuration(model, tmp_path):
    config = compose(overrides(tmp_path, model), CONFIG_NAME)
    config["trainer"]["default_local_dir"] = "a\0b"
    with pytest.raises(ConfigError, match=r"default_local_dir='a\\x00b' holds a character that no file name can have"):
        TrainingJob.prepare(config)


def test_a_configuration_that_is_nested_without_end_is_a_bad_one(model, tmp_path):
    config = compose(overrides(tmp_path, model), CONFIG_NAME)
    nested: object = 1
    for _ in range(5000):
        nested = [nested]
    config["reward"]["scorers"]["mine"] = {"type": "function", "path": "a.py", "reward_kwargs": {"deep": nested}}
    with pytest.raises(ConfigError, match=r"reward\.scorers\.mine\.reward_kwargs\.deep\.0.* nested more than 64 deep"):
        TrainingJob.prepare(config)
