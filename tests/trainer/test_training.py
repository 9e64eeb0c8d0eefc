"""Whole training runs on tiny models: real engine, real Ray, real FSDP2, on the CPU."""

from __future__ import annotations

import math
import os
import re
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest

from tests.docs.pages import DOCS
from tests.trainer import dying_reward
from tests.trainer.failing_scorer import failing_scorer
from tests.trainer.machines import two_machines
from verl_omni.testing.tiny_training import LEARNING, MODES, PROMPTS, history, overrides
from verl_omni.trainer.main_diffusion import main
from verl_omni.workers.config.scorers import HttpConfig

pytestmark = [pytest.mark.engine, pytest.mark.long]

SHORT, UNDER_FIRE = 3, 8
LONG = {"qwen_image": 17, "sd3": 12}
"""Steps after which the reward has clearly risen."""
DEATHS, DOWN_IN_STEP, DOWN_S = (3, 7), 5, 20.0
"""Steps of the run under fire in which its engine is killed, and the one in which its scorer is down, for how long."""
SETTINGS = (*LEARNING, "actor.use_kl_loss=true", "actor.kl_loss_coef=0")  # the KL is measured, and changes nothing
BATCHED = {"qwen_image": "step_wise", "sd3": "request_level"}
"""The mode of a model's long run: that of its example script."""
SERVER = "vllm_omni_server_0_0"
EVENTS = {
    "died": rf"ERROR {SERVER} died: .*; requests run again: \d+; a fresh server takes its place",
    "serves again": rf"WARNING {SERVER} serves again, \d+\.\d s after it died",
    "down": r"WARNING scorer http://\S+ is down, it is tried again: \w+: .*",
    "answers again": r"WARNING scorer http://\S+ answers again, \d+\.\d s after it first did not; failed attempts: \d+",
    "left out": r"ERROR left out: 4 of 4 images of \S+ \(s\d-p004\): the prompt has \d+ tokens after the template, "
    r"above max_sequence_length=32; shorten it, .*",
}
"""What happens under fire, in the order of the page → the line that tells it."""
History = dict[int, dict[str, float]]
only_qwen = pytest.mark.parametrize("model", ["qwen_image"], indirect=True)


def steps(number: int) -> str:
    return f"trainer.total_training_steps={number}"


@pytest.fixture(scope="module", params=["qwen_image", "sd3"])
def model(request, tiny_qwen, tiny_sd3) -> Path:
    return {"qwen_image": tiny_qwen, "sd3": tiny_sd3}[request.param]


@pytest.fixture(scope="module")
def histories(model, ray_session, tmp_path_factory) -> dict[str, History]:
    """Mode → the metrics of a run in it, with the same seeds; in the serial one the LoRA is merged."""
    found = {}
    for mode, number in ((BATCHED[model.name], LONG[model.name]), ("serial", SHORT)):
        folder = tmp_path_factory.mktemp(mode)
        merged = f"rollout.merge_lora={str(mode == 'serial').lower()}"
        assert main(overrides(folder, model, *MODES[mode], *SETTINGS, merged, steps(number))) == 0
        found[mode] = history(folder)
    return found


def run(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "verl_omni.trainer.main_diffusion", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)


def rewards(run: History) -> list[float]:
    return [run[k]["reward/mean"] for k in sorted(run) if k > 0]


def test_batched_and_serial_rollouts_learn_alike(histories):
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


def test_batches_are_what_the_mode_says(histories, model):
    assert histories["serial"][1]["rollout/batch_size_max"] == 1
    assert histories[BATCHED[model.name]][1]["rollout/batch_size_mean"] == 16


@dataclass
class UnderFire:
    """A run whose engine dies twice, whose scorer is down for a while, with a prompt that can't be served; killed."""

    arguments: list[str]
    folder: Path
    poisoned: str
    """Where that prompt stands."""
    scorer: str
    """Address."""
    status: int
    lines: list[str]
    """Its log, from warnings on."""


@pytest.fixture(scope="module")
def under_fire(model, tmp_path_factory) -> Iterator[UnderFire]:
    folder = tmp_path_factory.mktemp("under_fire")
    prompts = folder / "poisoned.txt"
    prompts.write_text("\n".join([*PROMPTS, "word " * 33]))
    for step in DEATHS:
        (folder / f"s{step}").touch()
    with failing_scorer(DOWN_IN_STEP, attempts_within(DOWN_S)) as address:
        arguments = overrides(
            folder,
            model,
            *MODES["step_wise"],
            *SETTINGS,
            steps(UNDER_FIRE),
            f"data.train_files={prompts}",
            "data.train_batch_size=5",
            "model.algorithm=dying",
            f"rollout.external_lib={Path(__file__).with_name('dying_engine.py')}",
            f"reward.custom_reward_function.path={dying_reward.__file__}",
            f"reward.scorers.far={{type:http,url:'{address}',retry_wait_s:0}}",
            "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=1",
        )
        killed = run(arguments, DEATHS=str(folder), DIE_IN_STEP=str(UNDER_FIRE))
        lines = [line for line in killed.stderr.splitlines() if line.startswith(("WARNING ", "ERROR "))]
        yield UnderFire(arguments, folder, f"{prompts}:{len(PROMPTS) + 1}", address, killed.returncode, lines)


def attempts_within(seconds: float) -> int:
    """Most attempts of a scorer's request in that time, with the default settings: with the shortest waits."""
    waits = [HttpConfig.retry_wait_s * 2**k / 2 for k in range(HttpConfig.retries)]
    return sum(begun < seconds for begun in accumulate(waits, initial=0.0))


@only_qwen
def test_a_run_under_fire_goes_on_and_tells_each_event_in_one_line(under_fire):
    assert under_fire.status == -signal.SIGKILL, under_fire.lines
    told = Counter(map(event_of, under_fire.lines))
    others = told.pop(None, 0)
    assert told == {"died": 2, "serves again": 2, "down": 1, "answers again": 1, "left out": UNDER_FIRE - 1}
    names = (SERVER, under_fire.scorer, under_fire.poisoned)
    assert len([line for line in under_fire.lines if not any(name in line for name in names)]) == others
    for step in range(1, UNDER_FIRE):
        assert len([line for line in under_fire.lines if f"{under_fire.poisoned} (s{step}-p004): " in line]) == 1


def test_the_lines_that_the_page_shows_are_of_these_kinds():
    shown = re.findall(r"^(?:ERROR|WARNING) .*$", (DOCS / "start/quickstart.md").read_text(), re.MULTILINE)
    assert [event_of(line) for line in shown] == list(EVENTS)


def event_of(line: str) -> str | None:
    """The kind of event that a line tells."""
    return next((kind for kind, pattern in EVENTS.items() if re.fullmatch(pattern, line)), None)


@only_qwen
def test_a_killed_run_goes_on_from_its_last_checkpoint_as_if_nothing_had_been(histories, under_fire, caplog):
    """The same is learnt as in a run without faults, and without the prompt that can't be served."""
    before = history(under_fire.folder)
    assert sorted(before) == list(range(1, UNDER_FIRE))
    for k, row in before.items():
        assert row["rollout/servers_restarted"] == (k in DEATHS)
        assert (row["rollout/requests_retried"] >= 16) == (k in DEATHS)
        assert row["rollout/failed"] == 4
    assert main(under_fire.arguments) == 0
    assert f"going on after step {UNDER_FIRE - 1}" in caplog.text
    resumed, whole = history(under_fire.folder), histories["step_wise"]
    assert sorted(resumed) == list(range(1, UNDER_FIRE + 1))
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
    assert [path.name for path in (under_fire.folder / "run").glob("global_step_*")] == [f"global_step_{UNDER_FIRE}"]
    assert main(under_fire.arguments) == 0
    assert f"all {UNDER_FIRE} steps are done" in caplog.text
    assert history(under_fire.folder) == resumed


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
    settings = (*LEARNING, "actor.optim.lr=0", steps(LONG[model.name]))
    assert main(overrides(tmp_path, model, *MODES["step_wise"], *settings)) == 0
    assert gain(rewards(history(tmp_path))) < 3


def gain(curve: list[float]) -> float:
    """How far the mean of the last five lies above that of the first five, in standard errors."""
    first, last = curve[:5], curve[-5:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / 5)
    return (statistics.mean(last) - statistics.mean(first)) / error
