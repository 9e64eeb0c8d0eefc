"""Checkpoints are read as data: what is cut short is named, and what is hidden in them is not run."""

from __future__ import annotations

import io
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from verl_omni.workers.engine.saved_state import METADATA, SafePlanner, SafeReader, check_saved_state, read_own

STATE = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "optimizer": {"lr": 1e-3, "step": 3, "names": ["a"]}}


class Mine:
    """A pickle that leaves a mark where it is run."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint."""
    found = tmp_path / "actor"
    dcp.save(STATE, checkpoint_id=found)
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    torch.save({"rng": rng, "lr_scheduler": {"last_epoch": 3}}, found / "rank_0.pt")
    return found


def load(folder: Path) -> dict:
    state = {"model": {"weight": torch.zeros(2, 3)}, "optimizer": {"lr": 0.0, "step": 0, "names": []}}
    dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner())
    return state


def test_what_was_saved_is_read(folder):
    check_saved_state(folder)
    found = load(folder)
    assert torch.equal(found["model"]["weight"], STATE["model"]["weight"])
    assert found["optimizer"] == STATE["optimizer"]
    own = read_own(folder / "rank_0.pt")
    assert own["lr_scheduler"] == {"last_epoch": 3} and own["rng"]["random"] == random.getstate()
    assert all(np.array_equal(a, b) for a, b in zip(own["rng"]["numpy"], np.random.get_state(), strict=True))


@pytest.mark.parametrize("name", [METADATA, "rank_0.pt", "__0_0.distcp"])
def test_a_file_that_was_cut_short_is_named(folder, name):
    file = folder / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"{file} (cannot be read|was cut short: it has \d+ bytes of \d+)"):
        check_saved_state(folder)


def test_a_file_that_is_missing_is_named(folder):
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing"):
        check_saved_state(folder)


def test_the_list_runs_nothing(folder, tmp_path):
    (folder / METADATA).write_bytes(pickle.dumps(Mine(tmp_path / "mark")))
    with pytest.raises(ValueError, match=r"asks for posix\.mkdir, which no checkpoint needs"):
        check_saved_state(folder)
    with pytest.raises(BaseException, match="metadata"):  # torch's own kind
        load(folder)
    assert not (tmp_path / "mark").exists()


def test_the_list_names_no_file_elsewhere(folder):
    metadata = SafeReader(folder).read_metadata()
    for part in metadata.storage_data.values():
        part.relative_path = "../elsewhere"
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"names '\.\./elsewhere', a file outside the checkpoint"):
        check_saved_state(folder)


def test_a_ranks_own_file_runs_nothing(folder, tmp_path):
    torch.save({"rng": Mine(tmp_path / "mark")}, folder / "rank_0.pt")
    with pytest.raises(ValueError, match=r"rank_0\.pt cannot be read"):
        check_saved_state(folder)
    assert not (tmp_path / "mark").exists()


def test_a_value_that_is_no_tensor_runs_nothing(tmp_path):
    stream = io.BytesIO()
    torch.save(Mine(tmp_path / "mark"), stream)
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        SafePlanner().load_bytes(None, stream)  # type: ignore[arg-type]
    assert not (tmp_path / "mark").exists()
