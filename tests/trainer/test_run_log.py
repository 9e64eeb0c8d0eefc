"""What a run leaves in its folder, on the console and in the logging backends."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import pytest
from PIL import Image

from tests.trainer.samples import scored
from verl_omni.reward_loop.item import RewardResult
from verl_omni.trainer.diffusion.metrics_file import METRICS, MetricsFile, read_metrics
from verl_omni.trainer.diffusion.run_log import RunLog, step_line
from verl_omni.trainer.diffusion.validation_grid import find_grids, reward_caption, validation_tiles, write_grid
from verl_omni.trainer.generation.grid import Tile
from verl_omni.utils.secrets import masked

TILES = [Tile(image=Image.new("RGB", (8, 8), "red"), label="0.5", prompt="a red square")] * 3


def run_log(folder: Path, *logger: str, **options) -> RunLog:
    options = {"project_name": "project", "experiment_name": "experiment", "config": {"a": {"b": 1}}, **options}
    return RunLog(folder, logger=logger, **options)


def train(log: RunLog, *steps: int, validate: bool = False) -> None:
    for step in steps:
        log.log(step, {"reward/mean": step / 10, "actor/loss": -step})
        if validate:
            log.log_validation(step, TILES, {"val/reward/mean": step / 5})


def raw(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_one_object_a_step_there_as_soon_as_it_is_logged(tmp_path):
    log = run_log(tmp_path)
    log.log_validation(0, [], {"val/reward/mean": 0.25})
    log.log(1, {"reward/mean": 0.5, "bad": math.nan, "worse": -math.inf})
    log.log_validation(1, TILES, {"val/reward/mean": 0.75})
    log.log(1, {"time/checkpoint_s": 2})
    assert raw(tmp_path) == [
        {"step": 0, "val/reward/mean": 0.25},
        {"step": 1, "reward/mean": 0.5, "bad": None, "worse": None, "val/reward/mean": 0.75, "time/checkpoint_s": 2},
    ]
    log.log(2, {})
    assert raw(tmp_path)[2:] == [{"step": 2}]
    log.close()


def test_what_cannot_be_recorded_is_an_error(tmp_path):
    log = run_log(tmp_path)
    log.log(2, {})
    with pytest.raises(ValueError, match="step 1 comes after step 2"):
        log.log(1, {})
    with pytest.raises(TypeError, match="reward/mean must be a number, got 'much'"):
        log.log(3, {"reward/mean": "much"})
    log.close()


def test_a_resumed_run_leaves_what_one_that_was_never_killed_leaves(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    log = run_log(whole)
    train(log, 1, 2, 3, 4, validate=True)
    log.close()
    train(run_log(killed), 1, 2, 3, validate=True)  # never closed
    with open(killed / METRICS, "a") as file:
        file.write('{"step": 4, "reward/me')
    log = run_log(killed, resume_step=2)
    assert list(find_grids(killed)) == [1, 2]
    train(log, 3, 4, validate=True)
    log.close()
    assert (killed / METRICS).read_bytes() == (whole / METRICS).read_bytes()
    assert list(find_grids(killed)) == [1, 2, 3, 4]


def test_a_new_run_keeps_nothing_of_an_earlier_one(tmp_path):
    train(run_log(tmp_path), 1, 2, validate=True)
    run_log(tmp_path).close()
    assert raw(tmp_path) == []
    assert not find_grids(tmp_path)


def test_what_is_merged_after_a_resume_goes_into_the_line_that_was_kept(tmp_path):
    train(run_log(tmp_path), 1, 2)
    log = run_log(tmp_path, resume_step=2)
    log.log(2, {"time/checkpoint_s": 1})
    log.log(3, {})
    log.close()
    assert [row["step"] for row in raw(tmp_path)] == [1, 2, 3]
    assert raw(tmp_path)[1] == {"step": 2, "reward/mean": 0.2, "actor/loss": -2, "time/checkpoint_s": 1}


def test_a_merged_line_may_be_shorter_than_it_was(tmp_path):
    file = MetricsFile(tmp_path, keep=None)
    file.write(1, {"x": 0.123456789, "ü": 1})
    file.write(1, {"x": 1})
    file.close()
    assert read_metrics(tmp_path) == raw(tmp_path) == [{"step": 1, "x": 1, "ü": 1}]


def test_grids_are_captioned_with_rewards(tmp_path):
    samples = [scored(name, uid="p", reward=0.5) for name in ("one", "two", "three")]
    tiles = validation_tiles(samples, {"p": "a prompt"}, limit=2)
    assert [(tile.label, tile.prompt) for tile in tiles] == [("0.500", "a prompt")] * 2
    parts = RewardResult(total=0.25, parts={"ocr": 0.5, "jpeg": -0.125, "ocr/distance": 3.0})
    assert reward_caption(parts.total, parts.parts) == "0.250: ocr 0.50, jpeg -0.12"
    path = write_grid(tmp_path, 10, tiles)
    write_grid(tmp_path, 9, tiles)
    assert list(find_grids(tmp_path)) == [9, 10]
    with Image.open(path) as image:
        assert image.width > 2 * 128  # two columns
    assert {file.name for file in path.parent.iterdir()} == {"step_9.png", "step_10.png"}


def test_a_step_in_one_line():
    metrics = {
        "reward/mean": 0.5123,
        "reward/std": 0.25,
        "actor/ratio_mean": 1.0000012,
        "actor/clip_fraction": 0.125,
        "rollout/logp_gap_mean": 3.2e-7,
        "time/generation_s": 5.25,
        "time/log_prob_s": 1.0,
        "time/step_s": 7.0,
        "perf/images_per_s_per_gpu": 2.125,
    }
    assert step_line(7, 300, metrics) == (
        "step   7/300  reward 0.5123 ± 0.2500  ratio 1.000001  clipped 12%  |Δ log p| 3.2e-07  2.12 img/s/GPU"
        "  7.0 s (generation 5.2, log_prob 1.0)"
    )
    assert step_line(7, None, {}) == "step 7"


def test_console_shows_a_line_a_step_and_where_the_report_is(tmp_path, capfd):
    log = run_log(tmp_path, "console", total_steps=2)
    train(log, 1, 2, validate=True)
    log.log(2, {"time/checkpoint_s": 1.0})
    log.close("interrupted")
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0].split("  ")[0] for line in lines] == [
        "step 1/2",
        "validation after step 1",
        "step 2/2",
        "validation after step 2",
        "interrupted after 2 steps; report",
    ]
    assert lines[-1].endswith(str(tmp_path / "report.html"))


def test_without_console_nothing_is_printed(tmp_path, capfd):
    log = run_log(tmp_path)
    train(log, 1, validate=True)
    log.close()
    assert capfd.readouterr() == ("", "")


def test_status_and_masked_configuration_are_on_record(tmp_path):
    config = {"reward": {"scorers": {"judge": {"api_key": "hush", "tokens": 3}}}, "list": [{"auth_token": "hush"}]}
    log = run_log(tmp_path, config=config, total_steps=9)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    log.close("failed")
    log.close("finished")  # the first word counts
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["status"] == "failed" and about["total_steps"] == 9
    assert about["config"] == masked(config)
    for name in ("run.json", "report.html"):
        assert "hush" not in (tmp_path / name).read_text()
    assert masked(config)["reward"]["scorers"]["judge"] == {"api_key": "***", "tokens": 3}
    assert masked({"extra_tokenizers": ["t"], "password": None}) == {"extra_tokenizers": ["t"], "password": None}


def test_tensorboard_gets_numbers_and_images_and_forgets_what_a_resume_drops(tmp_path):
    train(run_log(tmp_path, "tensorboard"), 1, 2, 3, validate=True)
    log = run_log(tmp_path, "tensorboard", resume_step=1)
    log.log(2, {"reward/mean": 7.0})
    log.close()
    events = tensorboard(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(7.0)),
    ]
    assert [event.step for event in events.Images("validation/grid")] == [1]
    assert "TENSORBOARD_DIR" not in os.environ


@pytest.mark.slow
def test_wandb_works_offline_and_inside_the_folder_of_each_run(tmp_path, monkeypatch):
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    attempts = ("first", "second")
    for attempt in attempts:
        log = run_log(tmp_path / attempt, "wandb")
        train(log, 1, 2, validate=True)
        log.close()
    wandb.teardown()  # its service writes the files in its own time, and at the latest when it ends
    for attempt in attempts:
        (run,) = (tmp_path / attempt / "wandb").glob("offline-run-*")
        (record,) = run.glob("*.wandb")
        content = record.read_bytes()
        assert b"reward/mean" in content and b"experiment" in content
        assert list(run.rglob("*.png"))
    assert not [path for path in home.rglob("*") if path.is_file()]
    assert not [name for name in os.environ if name in ("WANDB_DIR", "WANDB_MODE", "WANDB_RUN_GROUP")]


def test_a_backend_that_fails_is_warned_of_once_and_the_others_go_on(tmp_path, caplog):
    (tmp_path / "wandb").write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        log = run_log(tmp_path, "wandb", "tensorboard", "no_such_backend")
        train(log, 1, 2, validate=True)
        log.close()
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("verl_omni")]
    assert len(warnings) == 2
    assert all("metrics.jsonl" in warning for warning in warnings)
    assert warnings[0].startswith("wandb failed") and warnings[1].startswith("no_such_backend failed")
    assert len(raw(tmp_path)) == len(tensorboard(tmp_path).Scalars("reward/mean")) == 2


def test_a_backend_that_fails_later_is_left_alone(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/dev/full")  # opens, and takes nothing
    log = run_log(tmp_path, "file", "tensorboard")
    with caplog.at_level(logging.WARNING):
        train(log, 1, 2, 3, validate=True)
        log.close()
    (warning,) = [message for message in caplog.messages if "failed" in message]
    assert warning.startswith("file failed") and "No space left" in warning
    assert [row["step"] for row in raw(tmp_path)] == [1, 2, 3]
    assert len(tensorboard(tmp_path).Scalars("reward/mean")) == 3


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    log = run_log(tmp_path)
    train(log, 1, validate=True)
    log.close()
    assert "the report could not be written" in caplog.text
    assert raw(tmp_path)[0]["step"] == 1
