"""Whole training runs on tiny models: real engine, real Ray, real FSDP2, on the CPU."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import dying_reward
from verl_omni.testing.tiny_training import LEARNING, MODES, history, overrides
from verl_omni.trainer.main_diffusion import main

pytestmark = pytest.mark.engine

STEPS = 5
WITH_KL = ("actor.optim.lr=4e-3", "actor.use_kl_loss=true", "actor.kl_loss_coef=0")
SHORT = f"trainer.total_training_steps={STEPS}"
History = dict[int, dict[str, float]]


@pytest.fixture(scope="module", params=["qwen_image", "sd3"])
def model(request, tiny_qwen, tiny_sd3) -> Path:
    return {"qwen_image": tiny_qwen, "sd3": tiny_sd3}[request.param]


@pytest.fixture(scope="module")
def histories(model, ray_session, tmp_path_factory) -> dict[str, History]:
    """Mode → the metrics of a short run in it, all with the same seeds."""
    found = {}
    for mode, settings in MODES.items():
        folder = tmp_path_factory.mktemp(mode)
        assert main(overrides(folder, model, *settings, *WITH_KL, SHORT)) == 0
        found[mode] = history(folder)
    return found


def rewards(steps: History) -> list[float]:
    return [steps[k]["reward/mean"] for k in sorted(steps) if k > 0]


def test_the_modes_learn_alike(histories):
    curves = {mode: rewards(steps) for mode, steps in histories.items()}
    for curve in curves.values():
        assert curve == pytest.approx(curves["serial"], abs=1e-3)
    assert len(set(curves["serial"])) == STEPS  # other images each step, so the comparison says something


def test_rollout_and_trainer_agree_before_the_first_update(histories):
    for steps in histories.values():
        assert steps[1]["rollout/logp_gap_max"] < 1e-5
        assert steps[1]["actor/first_ratio_max_dev"] < 1e-5


def test_the_very_next_rollout_runs_the_new_lora(histories):
    """The policy moves away from the base model, and the rollout's log-probs stay those of the trained policy."""
    for steps in histories.values():
        assert steps[1]["actor/kl_loss"] == 0
        for k in range(2, STEPS + 1):
            assert steps[k]["rollout/policy_version"] == k - 1
            assert steps[k]["actor/kl_loss"] > 1e-6
            assert steps[k]["rollout/logp_gap_max"] < 1e-5


def test_batches_are_what_the_mode_says(histories):
    assert histories["serial"][1]["rollout/batch_size_max"] == 1
    for mode in ("step_wise", "request_level"):
        assert histories[mode][1]["rollout/batch_size_mean"] == 16


def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(histories, model, tmp_path, monkeypatch):
    arguments = overrides(
        tmp_path,
        model,
        *MODES["step_wise"],
        *WITH_KL,
        SHORT,
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
        f"reward.custom_reward_function.path={dying_reward.__file__}",
    )
    command = [sys.executable, "-m", "verl_omni.trainer.main_diffusion", *arguments]
    killed = subprocess.run(command, env={**os.environ, "DIE_IN_STEP": "4"}, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert max(history(tmp_path)) == 3
    assert main(arguments) == 0
    resumed, whole = history(tmp_path), histories["step_wise"]
    assert sorted(resumed) == sorted(whole)
    for k in whole:
        for name in (
            "reward/mean",
            "reward/std",
            "advantage/abs_mean",
            "actor/loss",
            "actor/grad_norm",
            "actor/kl_loss",
        ):
            assert resumed[k][name] == pytest.approx(whole[k][name], rel=1e-3, abs=1e-6), (k, name)
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == [f"global_step_{STEPS}"]


def test_two_processes_and_two_replicas_train_as_one_of_each(histories, model, tmp_path):
    arguments = overrides(tmp_path, model, *MODES["step_wise"], *WITH_KL, SHORT)
    assert main([*arguments, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.replicas=2"]) == 0
    together = history(tmp_path)
    assert rewards(together) == pytest.approx(rewards(histories["step_wise"]), abs=1e-3)
    assert together[1]["rollout/logp_gap_max"] < 1e-5
    assert together[1]["rollout/batch_size_max"] == 8  # half of the 16 each


@pytest.mark.parametrize("lr", [4e-3, 0])
def test_the_reward_rises_if_anything_is_learnt(lr, model, ray_session, tmp_path):
    mode = "step_wise" if "qwen" in model.name else "request_level"
    settings = (*LEARNING, f"actor.optim.lr={lr}", "trainer.total_training_steps=30")
    assert main(overrides(tmp_path, model, *MODES[mode], *settings)) == 0
    curve = rewards(history(tmp_path))
    first, last = curve[:5], curve[-5:]
    gain = (sum(last) - sum(first)) / 5
    error = math.sqrt((_variance(first) + _variance(last)) / 5)
    assert (gain > 3 * error) == (lr > 0), (gain, error)


def _variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
