"""What the example scripts ask for, without running it: their settings, variables and overrides."""

from __future__ import annotations

import pytest

from tests.examples.scripts import QWEN, QWEN_LORA, SD35_LORA, TINY

SCRIPTS = [QWEN, QWEN_LORA, SD35_LORA, TINY]


@pytest.mark.parametrize("script", [QWEN, QWEN_LORA])
def test_qwen_image(settings, script):
    made = settings(script)
    rollout = made.actor_rollout_ref.rollout
    assert (made.actor_rollout_ref.model.lora_rank == 0) == (script == QWEN)
    assert (rollout.step_execution, rollout.vllm_omni["max_num_seqs"]) == (True, 256)
    assert (rollout.pipeline.height, rollout.pipeline.width, rollout.pipeline.num_inference_steps) == (512, 512, 10)
    assert (rollout.pipeline.true_cfg_scale, rollout.n, made.data.train_batch_size) == (4.0, 16, 32)
    assert made.data.train_files == ["outputs/data/ocr_qwen_image/train.parquet"]


def test_sd35(settings):
    made = settings(SD35_LORA)
    rollout = made.actor_rollout_ref.rollout
    assert made.actor_rollout_ref.model.lora_rank > 0
    assert (rollout.step_execution, rollout.vllm_omni["max_num_seqs"]) == (False, 256)
    assert rollout.vllm_omni["request_batch_max_wait_ms"] == 10
    assert (rollout.pipeline.height, rollout.pipeline.width) == (384, 384)
    assert (rollout.algo.sde_type, rollout.n, made.data.train_batch_size) == ("cps", 8, 8)


@pytest.mark.parametrize("script", SCRIPTS)
def test_variables_and_overrides_reach_the_run(settings, script):
    names = {"MODEL_PATH": "m", "TRAIN_FILES": "[a.txt,b.txt]", "VAL_FILES": "v.txt", "NUM_GPUS": "2"}
    made = settings(script, "trainer.seed=7", "data.train_batch_size=6", MAX_NUM_SEQS="9", **names)
    assert made.actor_rollout_ref.model.path == "m"
    assert (made.data.train_files, made.data.val_files) == (["a.txt", "b.txt"], ["v.txt"])
    assert (made.trainer.n_gpus_per_node, made.trainer.seed, made.data.train_batch_size) == (2, 7, 6)
    assert made.actor_rollout_ref.rollout.vllm_omni["max_num_seqs"] == 9


def test_the_wait_of_request_batches_is_a_variable(settings):
    made = settings(SD35_LORA, REQUEST_BATCH_MAX_WAIT_MS="25")
    assert made.actor_rollout_ref.rollout.vllm_omni["request_batch_max_wait_ms"] == 25


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_alike(script):
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines
    assert lines[-1] == '    "$@"' and len(lines) <= 50
    assert script.stat().st_mode & 0o111
