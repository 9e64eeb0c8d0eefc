"""Checkpoint folders are complete or not there."""

import json
from pathlib import Path

import pytest

from verl_omni.trainer.diffusion.checkpoint import TRACKER, Checkpoints
from verl_omni.trainer.folders import locked
from verl_omni.workers.config import ConfigError, DiffusionModelConfig


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.writing(step) as part:
        part.actor.mkdir()
        (part.actor / "weights").write_text(str(step))


def test_auto_goes_on_from_the_latest(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.find("auto") is None
    save(checkpoints, 2)
    save(checkpoints, 10)
    found = checkpoints.find("auto")
    assert found is not None and found.step == 10
    assert (found.actor / "weights").read_text() == "10"
    assert checkpoints.find("disable") is None
    chosen = checkpoints.find(str(tmp_path / "global_step_2"))
    assert chosen is not None and chosen.step == 2


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    full = checkpoints.writing(2)
    full.__enter__().actor.mkdir()
    assert not full.__exit__(OSError, OSError("disk full"), None)
    found = checkpoints.find("auto")
    assert found is not None and found.step == 1
    assert not checkpoints.at(2).folder.exists()
    save(checkpoints, 2)  # what the failed one left is no hindrance
    found = checkpoints.find("auto")
    assert found is not None and found.step == 2


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    (checkpoints.at(3).folder / "stale").touch()
    save(checkpoints, 3)
    assert not (checkpoints.at(3).folder / "stale").exists()


def test_a_run_that_is_killed_while_it_replaces_a_checkpoint_still_finds_one(tmp_path: Path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    rename = Path.rename

    def killed(self, target):
        if self.suffix == ".part":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 3)
    assert not checkpoints.at(3).folder.exists()
    found = checkpoints.find("auto")
    assert found is not None and (found.actor / "weights").read_text() == "3"


def test_only_the_newest_stay(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (8, 9, 10):
        save(checkpoints, step)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_10", "global_step_9"]


def test_what_an_earlier_run_left_does_not_push_out_the_new_one(tmp_path: Path):
    save(Checkpoints(tmp_path), 100)
    anew = Checkpoints(tmp_path, keep=1)
    for step in (10, 20):
        save(anew, step)
    found = anew.find("auto")
    assert found is not None and found.step == 20
    assert not anew.at(10).folder.exists()


def test_what_is_no_checkpoint_is_told(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.resume_mode='nowhere' is no checkpoint folder"):
        checkpoints.find("nowhere")
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(ConfigError, match="says '7', but there is no such checkpoint"):
        checkpoints.find("auto")


def test_a_run_that_begins_anew_does_not_go_on_from_an_older_one(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5)
    checkpoints.start_anew()
    assert checkpoints.find("auto") is None
    assert checkpoints.at(5).folder.is_dir()  # whoever wants it may still name it


@pytest.mark.parametrize(
    ("made", "now", "message"),
    [
        ({"r": 8, "lora_alpha": 16}, {"lora_rank": 8, "lora_alpha": 16}, None),
        ({"r": 8, "lora_alpha": 16}, {"lora_rank": 16, "lora_alpha": 16}, "model.lora_rank=8 .*model.lora_alpha=16"),
        ({"r": 8, "lora_alpha": 16}, {"lora_rank": 8, "lora_alpha": 8}, "model.lora_alpha=16"),
        ({"r": 8, "lora_alpha": 16}, {"lora_rank": 0}, "model.lora_rank=8"),
        (None, {"lora_rank": 0}, None),
        (None, {"lora_rank": 8}, "was made with actor_rollout_ref.model.lora_rank=0; write that"),
    ],
)
def test_what_a_checkpoint_trains_has_to_be_what_the_run_trains(tmp_path: Path, made, now, message):
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(3) as part:
        part.actor.mkdir()
        if made is not None:
            part.lora.mkdir()
            (part.lora / "adapter_config.json").write_text(json.dumps(made))
    found = checkpoints.find("auto")
    assert found is not None
    model = DiffusionModelConfig(path="model", **now)
    if message is None:
        found.check_trains(model)
    else:
        with pytest.raises(ConfigError, match=message):
            found.check_trains(model)


def test_a_run_that_begins_anew_names_the_checkpoints_that_stay(tmp_path: Path, caplog):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.start_anew()
    assert not caplog.records
    save(checkpoints, 3)
    checkpoints.start_anew()
    assert "holds global_step_3 of an earlier run, which stay there" in caplog.text


@pytest.mark.parametrize("content", [b"\xff\xfe", b"9" * 5000, b"three"])
def test_a_tracker_that_is_no_number_is_an_error(tmp_path: Path, content):
    (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        Checkpoints(tmp_path).find("auto")


def test_a_folder_is_locked_while_a_run_has_it(tmp_path: Path):
    folder = tmp_path / "new" / "run"
    message = r"trainer.default_local_dir: another run is writing into .*new/run"
    with (
        locked(folder, key="trainer.default_local_dir"),
        pytest.raises(ConfigError, match=message),
        locked(folder, key="trainer.default_local_dir"),
    ):
        pass
    with locked(folder, key="trainer.default_local_dir"):
        pass
    with locked(folder, key="trainer.default_local_dir"):
        pass
    assert list(folder.iterdir()) == []
