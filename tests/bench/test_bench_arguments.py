"""The command line of the bench: what can't be ends at once, with a word on what to write."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_omni.bench import cli, servers
from verl_omni.bench.arguments import CPU_CAPS, GPU_CAPS, parse
from verl_omni.bench.cli import main, open_model, read_record
from verl_omni.bench.model import build_random
from verl_omni.bench.outputs import check_outputs
from verl_omni.bench.session import make_bench
from verl_omni.bench.workload import SERIAL_REQUESTS
from verl_omni.testing import tiny_models
from verl_omni.workers.config import ConfigError


def args(*argv: str) -> argparse.Namespace:
    return parse(["--tiny", "sd3", *argv], "about")


def test_the_defaults_are_a_burst_of_every_mode_without_lora():
    made = args()
    assert (made.modes, made.size, made.cfg) == (None,) * 3 and made.caps in (CPU_CAPS, GPU_CAPS)
    assert (made.arrivals, made.lora_rank, made.text, made.replicas) == (["burst"], [0], (64, 64), 1)


def test_lengths_are_a_number_or_a_range():
    assert args("--text", "20-250").text == (20, 250) and args("--text", "7").text == (7, 7)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2"),
        (["--text", "9-3"], "argument --text"),
        (["--caps", "4", "0"], "--caps must be at least 1"),
        (["--caps", "4", str(10**30)], "--caps must be at most 65536"),
        (["--size", "64", "0"], "--size must be at least 1"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--lora-rank", "8", "0"], "--lora-rank takes ranks in rising order"),
        (["--merge-lora"], "--merge-lora needs --lora-rank"),
        (["--lora-rank", "0", "8", "--profile", "p.json"], "--profile needs one --lora-rank"),
        (["--arrivals", "staggered", "--profile", "p.json"], "--profile needs --arrivals burst"),
        (["--profile", "p.json", "--caps", "4", "8", "--requests", "7"], "--profile needs --requests 8 or more"),
        (["--max-sequence-length", "63"], "is below the 64 tokens of --text"),
        (["--log-prob-gap", "4", "--replicas", "2"], "--log-prob-gap needs one engine"),
        (["--log-prob-gap", "4", "--arrivals", "staggered"], "--log-prob-gap needs --arrivals burst"),
        (["--log-prob-gap", "4", "--lora-rank", "8"], "--log-prob-gap needs 0 in --lora-rank, or --merge-lora"),
        (["--log-prob-gap", "3", "8"], "--log-prob-gap takes numbers that divide the largest, 8"),
        (["--log-prob-gap", "8", "--engine", '{"rows_per_forward": 4}'], "is above the rows_per_forward=4"),
        (["--torch-profile", "p", "--arrivals", "staggered"], "--torch-profile needs --arrivals burst"),
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


@pytest.mark.parametrize(
    "argv",
    [
        "--log-prob-gap 2 8 --lora-rank 8 --merge-lora",
        "--log-prob-gap 4 2 --lora-rank 0 8",
        "--profile p.json --modes serial --requests 2",
        "--profile p.json --caps 4 8 --requests 8",
    ],
)
def test_what_can_be_is_not_refused(argv: str):
    assert args(*argv.split()).log_prob_gap or args(*argv.split()).profile


def test_a_checkpoint_is_not_kept_elsewhere(capsys):
    with pytest.raises(SystemExit):
        parse(["model", "--keep", "folder"], "about")
    assert "--keep needs --random or --tiny" in capsys.readouterr().err


def test_requests_count_for_serial_mode_where_it_is_the_only_one():
    def most(*modes: str) -> int | None:
        adapter = SimpleNamespace(num_encoders=1)
        model: Any = SimpleNamespace(architecture="Other", adapter=adapter)
        return make_bench(args("--requests", "20", "--n", "5", "--modes", *modes), model).most_serial

    assert most("serial") is None and most("serial", "step_wise") == SERIAL_REQUESTS


def test_a_random_model_that_is_kept_is_built_once(tmp_path: Path, monkeypatch):
    def build(family: str, out: Path) -> Path:
        built.append(family)
        out.mkdir()
        (out / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
        return out

    built: list[str] = []
    monkeypatch.setattr(tiny_models, "build", build)
    models = [open_model(args(), tmp_path / "new") for _ in range(2)]
    assert built == ["sd3"] and models[0] == models[1]
    assert models[0].path == tmp_path / "new/tiny_sd3" and models[0].name == "tiny sd3"


def test_a_build_that_is_cut_short_leaves_nothing(tmp_path: Path, monkeypatch):
    def build(family: str, out: Path) -> Path:
        out.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_models, "build", build)
    with pytest.raises(KeyboardInterrupt):
        build_random("tiny", "sd3", tmp_path / "sd3")
    assert not list(tmp_path.iterdir())


def test_a_model_must_be_named(capsys):
    with pytest.raises(SystemExit):
        parse([], "about")
    assert "one of the arguments model --random --tiny is required" in capsys.readouterr().err


def baseline(**changed: Any) -> str:
    """A record with one row, of which something is changed."""
    where = {"mode": "serial", "max_num_seqs": 1, "replicas": 1, "lora_rank": 0, "arrivals": "burst"}
    measured = {**where, "requests": 1, "images_per_s": 1.0, "seconds": [[1.0]]}
    row = {**measured, **{key: changed.pop(key) for key in [*changed] if key in measured}}
    return json.dumps({"workload": {}, "rows": [row], "device": "some CPU", **changed})


def test_a_record_is_a_baseline(tmp_path: Path):
    (tmp_path / "baseline.json").write_text(baseline())
    assert read_record(tmp_path / "baseline.json") == json.loads(baseline())


@pytest.mark.parametrize(
    "content",
    [
        "{",
        json.dumps([]),
        json.dumps({"rows": []}),
        "[" * 100_000,
        baseline(workload=[]),
        baseline(rows={}),
        baseline(rows=[1]),
        baseline(rows=[{}]),
        baseline(seconds=[]),
        baseline(seconds=[[]]),
        baseline(seconds=[[0]]),
        baseline(images_per_s="fast"),
    ],
)
def test_a_baseline_that_is_no_record_is_refused_before_anything_is_measured(content: str, tmp_path: Path, capfd):
    file = tmp_path / "baseline.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"baseline\.json is no record of this bench"):
        read_record(file)
    assert main(["--tiny", "sd3", "--baseline", str(file)]) == 2
    assert "config error: --baseline" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--out {folder}", r"--out \S+ is a folder; write the name of a file, like \S+record.json"),
        ("--profile {folder}", r"--profile \S+ is a folder; write the name of a file, like \S+profile.json"),
        ("--out {file}/x/y.json", r"--out \S+: \S+x is no folder and cannot be made one"),
        ("--keep {file}", "is no folder and cannot be made one"),
        ("--torch-profile {file}/x", "is no folder and cannot be made one"),
        ("--out {folder}/a.json --profile {folder}/a.json", "--profile \\S+ would overwrite --out"),
        ("--out {folder}/a.json --baseline {folder}/../{folder.name}/a.json", "--out \\S+ would overwrite --baseline"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(argv: str, message: str, tmp_path: Path):
    (tmp_path / "file").touch()
    given = argv.format(folder=tmp_path, file=tmp_path / "file").split()
    made = argparse.Namespace(out=None, plot=None, profile=None, baseline=None, keep=None, torch_profile=None)
    for option, value in zip(given[::2], given[1::2], strict=True):
        name = option.removeprefix("--").replace("-", "_")
        setattr(made, name, value if name == "torch_profile" else Path(value))
    with pytest.raises(ConfigError, match=message):
        check_outputs(made)


def test_a_file_without_the_right_to_write_it_is_refused(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["--tiny", "sd3", "--out", str(tmp_path / "a.json")]) == 2
    assert f"config error: --out {tmp_path / 'a.json'} cannot be written" in capfd.readouterr().err


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capfd):
    assert main([str(tmp_path)]) == 2
    assert f"config error: '{tmp_path}' holds no model_index.json" in capfd.readouterr().err


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    assert main(["models/Qwen-Image"]) == 2
    assert "config error: models/Qwen-Image is no folder here; write" in capfd.readouterr().err


def test_a_model_that_does_not_say_what_it_is_is_refused_without_keys_of_a_run(tmp_path: Path, capfd):
    (tmp_path / "model_index.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    error = capfd.readouterr().err
    assert "has no _class_name; write it there" in error and "actor_rollout_ref" not in error


def test_a_random_model_is_kept_in_a_folder_of_its_name(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("verl_omni.bench.cli.build_random", lambda kind, family, path: path.mkdir())
    monkeypatch.setattr("verl_omni.bench.cli.BenchModel.open_random", lambda kind, family, path: path)
    opened = open_model(parse(["--tiny", "sd3", "--keep", str(tmp_path)], ""), tmp_path)
    assert opened == tmp_path / "tiny_sd3"
    with pytest.raises(SystemExit):
        parse(["--help"], "")
    assert "FOLDER/tiny_sd3" in capsys.readouterr().out


def test_ray_is_prepared_before_the_model_is_looked_at_which_imports_what_imports_ray(monkeypatch):
    def opened(*given: object) -> None:
        order.append("opened")
        raise ConfigError("enough")

    order: list[str] = []
    monkeypatch.setattr(servers, "prepare_process", lambda device, *, own_ray: order.append("prepared"))
    monkeypatch.setattr(cli, "open_model", opened)
    assert main(["--tiny", "sd3", "--replicas", "2"]) == main(["--tiny", "sd3"]) == 2
    assert order == ["prepared", "opened", "opened"]
