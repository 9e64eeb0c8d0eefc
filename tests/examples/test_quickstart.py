"""The quickstart: its commands ask for what the page says."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, code_spans, prose, table
from tests.examples.scripts import TINY, VARIABLES, run_script
from verl_omni.trainer.diffusion.checkpoint import TRACKER
from verl_omni.trainer.diffusion.metrics_file import METRICS
from verl_omni.trainer.diffusion.report import REPORT, RUN
from verl_omni.trainer.diffusion.settings import LOGGERS

PAGE = DOCS / "start/quickstart.md"


def script_commands() -> list[str]:
    """The page's commands that run a script, each on one line."""
    lines = [line for found in blocks(PAGE, language="") for line in found.text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if ".sh" in line]


@pytest.mark.parametrize("command", script_commands())
def test_commands_run_scripts_with_settings_that_can_be(settings, command):
    words = shlex.split(command)
    env = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    script, *overrides = words[len(env) :]
    env.pop("PYTHON", None)
    made = settings(ROOT / script, *overrides, **env)
    assert made.trainer.n_gpus_per_node == int(env.get("NUM_GPUS", 1))


def test_the_machines_and_the_own_gpus_of_the_rollout(settings):
    def of(part: str):
        (command,) = (command for command in script_commands() if part in command)
        words = shlex.split(command)
        return settings(
            ROOT / next(word for word in words if ".sh" in word), *(w for w in words if re.match("[a-z_.]+=", w))
        )

    assert of("nnodes").trainer.nnodes == 2
    rollout = of("colocate").actor_rollout_ref.rollout
    assert (rollout.colocate, rollout.replicas) == (False, 4)


def test_further_settings_of_the_page_are_known(settings):
    given = [word for word in code_spans(prose(PAGE)) if re.fullmatch(r"[a-z_.]+=[\w\[\],]+", word)]
    overrides = [word for word in given if "." in word and "FOLDER" not in word]
    assert len(overrides) >= 5
    made = settings(TINY, *overrides)
    assert tuple(made.trainer.logger) == LOGGERS
    assert made.actor_rollout_ref.rollout.vllm_omni["rows_per_forward"] == 8


def test_the_variables_are_those_of_the_scripts():
    rows = table(PAGE, "variable").rows
    assert {name for row in rows for name in code_spans(row[0])} == {*VARIABLES, "PYTHON"}


def test_the_files_have_the_names_that_the_trainer_gives_them():
    names = {code_spans(row[0])[0] for row in table(PAGE, "file").rows}
    assert {REPORT, METRICS, RUN, TRACKER} <= names


def test_all_settings_can_be_shown(tmp_path, tiny_qwen):
    result = run_script(TINY, "--cfg", "job", "--resolve", cwd=tmp_path, MODEL_PATH=str(tiny_qwen))
    assert result.returncode == 0, result.stderr
    assert "max_num_seqs: 16" in result.stdout and "total_training_steps: 30" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_the_table_of_changes_says_can_be_set(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text("def compute_score(image):\n    return 0\n")
    rows = table(PAGE, "to have").rows
    assert len(rows) >= 6
    for _, before, after in rows:
        env = dict(span.split("=", 1) for span in code_spans(before))
        made = settings(TINY, *(word for span in code_spans(after) for word in shlex.split(span)), **env)
        if "custom_reward_function" in after:
            assert list(made.reward.named_scorers()) == ["custom"]
