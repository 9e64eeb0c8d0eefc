"""Fixtures of the tests of the examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.scripts import run_script
from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion.settings import TrainSettings

RECORDER = """#!/bin/sh
[ "$1" = -m ] && [ "$2" = verl_omni.trainer.main_diffusion ] || exec ${OTHERS:-true} "$@"
shift 2
printf '%s\\n' "$@" > run.txt
"""


@pytest.fixture
def command_line(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a script in `tmp_path` with an interpreter that only writes down the training's arguments, and gives these.

    ``OTHERS``: the interpreter of what else the script runs; by default that is left out.
    """
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)

    def run(script: Path, *overrides: str, **env: str) -> list[str]:
        result = run_script(script, *overrides, cwd=tmp_path, PYTHON=str(python), **env)
        assert result.returncode == 0, result.stderr
        return (tmp_path / "run.txt").read_text().splitlines()

    return run


@pytest.fixture
def settings(command_line: Callable[..., list[str]]) -> Callable[..., TrainSettings]:
    """The settings that a script trains with."""

    def run(script: Path, *overrides: str, **env: str) -> TrainSettings:
        config = compose(command_line(script, *overrides, **env), "diffusion_trainer")
        assert config is not None
        return TrainSettings.from_mapping(config)

    return run
