"""Whole training runs on tiny models: real engine, real Ray, real FSDP2, on the CPU."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import dying_reward
from tests.trainer.machines import two_machines
from verl_omni.testing.tiny_training import LEARNING, MODES, history, overrides
from verl_omni.trainer.main_diffusion import main

pytestmark = [pytest.mark.engine, pytest.mark.long]

SHORT, LONG = 5, 30
SETTINGS = (*LEARNING, "actor.use_kl_loss=true", "actor.kl_loss_coef=0")  # the KL is measured, and changes nothing
BATCHED = {"qwen_image": "step_wise", "sd3": "request_level"}
"""The mode in which a model's long run is: that of its example script."""
History = dict[int, dict[str, float]]
only_qwen = pytest.mark.parametrize("model", ["qwen_image"], indirect=True)


def steps(number: int) -> str:
    return f"trainer.total_training_steps={number}"


@pytest.fixture(scope="module", params=["qwen_image", "sd3"])
def model(request, tiny_qwen, tiny_sd3) -> Path:
    return {"qwen_image": tiny_qwen, "sd3": tiny_sd3}[request.param]


@pytest.fixture(scope="module")
def histories(model, ray_session, tmp_path_factory) -> dict[str, History]:
    """Mode → the metrics of a run in it, all with the same seeds; in the serial one the LoRA is merged."""
    found = {}
    for mode, settings in MODES.items():
        folder = tmp_path_factory.mktemp(mode)
        number = LONG if mode == BATCHED[model.name] else SHORT
        merged = f"rollout.merge_lora={str(mode == 'serial').lower()}"
        assert main(overrides(folder, model, *settings, *SETTINGS, merged, steps(number))) == 0
        found[mode] = history(folder)
    return found


def run(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "verl_omni.trainer.main_diffusion", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)


def rewards(run: History) -> list[float]:
    return [run[k]["reward/mean"] for k in sorted(run) if k > 0]


def test_the_modes_learn_alike(histories):
    curves = {mode: rewards(run)[:SHORT] for mode, run in histories.items()}
    for curve in curves.values():
        assert curve == pytest.approx(curves["serial"], abs=1e-3)
    assert len(set(curves["serial"])) == SHORT  # other images each step, so the comparison says something


def test_rollout_and_trainer_agree_before_the_first_update(histories):
    for run in histories.values():
        assert run[1]["rollout/logp_gap_max"] < 1e-5
        assert run[1]["actor/first_ratio_max_dev"] < 1e-5


def test_the_very_next_rollout_runs_the_new_lora(histories):
    """The policy moves away from the base model, and the rollout's log-probs stay those of the trained policy."""
    for run in histories.values():
        assert run[1]["actor/kl_loss"] == 0
        for k in range(2, len(rewards(run)) + 1):
            assert run[k]["rollout/policy_version"] == k - 1
            assert run[k]["actor/kl_loss"] > 1e-6
            assert run[k]["rollout/logp_gap_max"] < 1e-5


def test_batches_are_what_the_mode_says(histories):
    assert histories["serial"][1]["rollout/batch_size_max"] == 1
    for mode in ("step_wise", "request_level"):
        assert histories[mode][1]["rollout/batch_size_mean"] == 16


@only_qwen
def test_a_run_outlives_its_server_and_when_it_is_killed_goes_on_from_its_last_checkpoint(
    histories, model, tmp_path, caplog
):
    arguments = overrides(
        tmp_path,
        model,
        *MODES["step_wise"],
        *SETTINGS,
        steps(SHORT),
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
        f"reward.custom_reward_function.path={dying_reward.__file__}",
    )
    killed = run(arguments, KILL_SERVER_IN_STEP="2", DIE_IN_STEP="4")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    deaths = {k: row["rollout/servers_restarted"] for k, row in history(tmp_path).items()}
    assert deaths == {1: 0, 2: 1, 3: 0}
    for told in ("vllm_omni_server_0_0 died: ", "vllm_omni_server_0_0 serves again, "):
        assert len([line for line in killed.stderr.splitlines() if told in line]) == 1
    assert main(arguments) == 0
    assert "going on after step 3" in caplog.text
    resumed, whole = history(tmp_path), histories["step_wise"]
    assert sorted(resumed) == list(range(1, SHORT + 1))
    for k in resumed:
        for name in (
            "reward/mean",
            "reward/std",
            "advantage/abs_mean",
            "actor/loss",
            "actor/grad_norm",
            "actor/kl_loss",
        ):
            assert resumed[k][name] == pytest.approx(whole[k][name], rel=1e-3, abs=1e-6), (k, name)
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == [f"global_step_{SHORT}"]
    assert main(arguments) == 0
    assert f"all {SHORT} steps are done" in caplog.text
    assert history(tmp_path) == resumed


@only_qwen
def test_a_run_that_cannot_start_leaves_what_was_there(model, ray_session, tmp_path, capfd):
    for file in ("metrics.jsonl", "run.json", "latest_checkpointed_iteration.txt", "global_step_1/lora/weights"):
        path = tmp_path / "run" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = overrides(tmp_path, model, *SETTINGS, "trainer.resume_mode=disable", "trainer.n_gpus_per_node=16")
    assert main(arguments) == 2
    assert "trainer.n_gpus_per_node" in capfd.readouterr().err
    assert {path: path.read_text() for path in before} == before


@only_qwen
def test_two_machines_with_a_replica_each_train_as_one(histories, model, tmp_path):
    arguments = overrides(tmp_path, model, *MODES["step_wise"], *SETTINGS, steps(2), "trainer.nnodes=2")
    with two_machines() as address:
        done = run(arguments, RAY_ADDRESS=address)
    assert done.returncode == 0, done.stderr[-4000:]
    together = history(tmp_path)
    assert rewards(together) == pytest.approx(rewards(histories["step_wise"])[:2], abs=1e-3)
    assert together[1]["rollout/logp_gap_max"] < 1e-5
    assert together[1]["rollout/batch_size_max"] == 8  # half of the 16 each


def test_the_reward_rises(histories, model):
    assert gain(rewards(histories[BATCHED[model.name]])) > 3


@only_qwen
def test_it_does_not_rise_if_nothing_is_learnt(model, ray_session, tmp_path):
    settings = (*LEARNING, "actor.optim.lr=0", steps(LONG))
    assert main(overrides(tmp_path, model, *MODES["step_wise"], *settings)) == 0
    assert gain(rewards(history(tmp_path))) < 3


def gain(curve: list[float]) -> float:
    """How far the mean of the last five lies above that of the first five, in standard errors."""
    first, last = curve[:5], curve[-5:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / 5)
    return (statistics.mean(last) - statistics.mean(first)) / error
