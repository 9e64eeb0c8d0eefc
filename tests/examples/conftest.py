"""Fixtures of the tests of the examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.scripts import run_script
from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion.settings import TrainSettings

RECORDER = """#!/bin/sh
[ "$1" = -m ] && [ "$2" = verl_omni.trainer.main_diffusion ] && shift 2 && printf '%s\\n' "$@" >> run.txt
exit 0
"""


@pytest.fixture
def settings(tmp_path: Path):
    """Runs a script with an interpreter that only writes down what it is to run; gives the settings of that."""
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)

    def run(script: Path, *overrides: str, **env: str) -> TrainSettings:
        result = run_script(script, *overrides, cwd=tmp_path, PYTHON=str(python), **env)
        assert result.returncode == 0, result.stderr
        config = compose((tmp_path / "run.txt").read_text().splitlines(), "diffusion_trainer")
        assert config is not None
        return TrainSettings.from_mapping(config)

    return run
