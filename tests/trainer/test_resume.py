"""What a run that goes on from a checkpoint may change, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.trainer.test_train_settings import settings
from verl_omni.trainer.diffusion.checkpoint import CONFIG, Checkpoint, Checkpoints
from verl_omni.trainer.diffusion.resume import MAX_TOLD, check_continues, run_config
from verl_omni.workers.config import ConfigError

MODEL = "actor_rollout_ref.model"


def made_with(folder: Path, **changes) -> Checkpoint:
    checkpoints = Checkpoints(folder, config=run_config(settings(**{f"{MODEL}.lora_rank": 0} | changes)))
    with checkpoints.writing(3) as part:
        dcp.save({"model": {"w": torch.zeros(2)}}, checkpoint_id=part.actor)
    found = checkpoints.find("auto")
    assert found is not None
    return found


def lines(caplog) -> list[str]:
    """What we logged; torch logs too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("verl_omni")]


def now(**changes):
    return settings(**{f"{MODEL}.lora_rank": 0} | changes)


def test_the_same_settings_go_on_without_a_word(tmp_path, caplog):
    check_continues(made_with(tmp_path), now(trainer__total_training_steps=99, trainer__resume_mode="auto"))
    assert not lines(caplog)


def test_what_differs_is_told_in_one_line(tmp_path, caplog):
    found = made_with(tmp_path)
    check_continues(found, now(**{"actor_rollout_ref.rollout.batching_mode": "serial", "reward.num_workers": 3}))
    (line,) = lines(caplog)
    assert line == (
        f"going on from {found.folder} with other settings: "
        "actor_rollout_ref.rollout.batching_mode=serial (was null), reward.num_workers=3 (was 8)"
    )


def test_of_many_differences_the_first_are_named_and_the_others_counted(tmp_path, caplog):
    found = made_with(tmp_path)
    config = json.loads((found.folder / CONFIG).read_text())
    config["old"] = {f"key{i}": i for i in range(MAX_TOLD + 2)}
    (found.folder / CONFIG).write_text(json.dumps(config))
    check_continues(found, now())
    assert lines(caplog)[0].endswith(", and 2 more")


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [("path", "model-a", "model-b"), ("target_modules", ["to_q"], ["to_q", "to_k"])],
)
def test_what_is_trained_has_to_be_the_same(tmp_path, key, before, after):
    lora = {f"{MODEL}.lora_rank": 32}
    found = made_with(tmp_path, **lora | {f"{MODEL}.{key}": before})
    (found.lora).mkdir()
    (found.lora / "adapter_config.json").write_text('{"r": 32, "lora_alpha": 64}')
    check_continues(found, now(**lora | {f"{MODEL}.{key}": before}))
    with pytest.raises(ConfigError, match=rf"was made with {MODEL}\.{key}=.*; write that to go on with it"):
        check_continues(found, now(**lora | {f"{MODEL}.{key}": after}))


def test_a_checkpoint_without_a_record_is_taken_as_it_is(tmp_path, caplog):
    found = made_with(tmp_path)
    (found.folder / CONFIG).unlink()
    check_continues(found, now(**{"reward.num_workers": 3}))
    assert not lines(caplog)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_record_that_cannot_be_read_is_named(tmp_path, content):
    found = made_with(tmp_path)
    (found.folder / CONFIG).write_text(content)
    with pytest.raises(ConfigError, match=rf"{CONFIG} .*; write trainer\.resume_mode="):
        check_continues(found, now())


def test_a_checkpoint_that_was_cut_short_is_named(tmp_path):
    found = made_with(tmp_path)
    file = next(found.actor.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{file} was cut short: .*; write trainer\.resume_mode="):
        check_continues(found, now())


def test_the_record_holds_no_secret(tmp_path):
    url = "http://host/score?token=hush-hush"
    found = made_with(tmp_path, **{"reward.scorers": {"a": {"type": "http", "url": url}}})
    assert "hush-hush" not in (found.folder / CONFIG).read_text()
