"""The command line of the bench: what can't be ends at once, with a word on what to write."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from verl_omni.bench.arguments import parse
from verl_omni.bench.cli import main, read_record
from verl_omni.workers.config import ConfigError


def args(*argv: str) -> argparse.Namespace:
    return parse(["--tiny", "sd3", *argv], "about")


def test_the_defaults_are_a_burst_of_every_mode_without_lora():
    made = args()
    assert (made.modes, made.caps, made.size, made.cfg) == (None,) * 4
    assert (made.arrivals, made.lora_rank, made.text, made.replicas) == (["burst"], [0], (64, 64), 1)


def test_lengths_are_a_number_or_a_range():
    assert args("--text", "20-250").text == (20, 250) and args("--text", "7").text == (7, 7)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2"),
        (["--text", "9-3"], "argument --text"),
        (["--caps", "4", "0"], "--caps must be at least 1"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--lora-rank", "8", "0"], "--lora-rank takes ranks in rising order"),
        (["--merge-lora"], "--merge-lora needs --lora-rank"),
        (["--lora-rank", "0", "8", "--profile", "p.json"], "--profile needs one --lora-rank"),
        (["--arrivals", "staggered", "--profile", "p.json"], "--profile needs --arrivals burst"),
        (["--plot", "p.png"], "write a name that ends in .svg"),
        (["--size", "1", "2", "3"], "--size takes a height, and a width"),
        (["--engine", "[1]"], "--engine takes a JSON object"),
        (["--engine", '{"max_num_seqs": 4}'], "which --modes and --caps decide"),
        (["--modes", "both"], "argument --modes"),
        (["model"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_is_refused(argv: list[str], message: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        args(*argv)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_model_must_be_named(capsys):
    with pytest.raises(SystemExit):
        parse([], "about")
    assert "one of the arguments model --random --tiny is required" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", json.dumps([]), json.dumps({"rows": []})])
def test_a_baseline_that_is_no_record_is_refused_before_anything_is_measured(content: str, tmp_path: Path, capsys):
    file = tmp_path / "baseline.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"baseline\.json is no record of this bench"):
        read_record(file)
    assert main(["--tiny", "sd3", "--baseline", str(file)]) == 2
    assert "config error: --baseline" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no model_index.json" in capsys.readouterr().err
