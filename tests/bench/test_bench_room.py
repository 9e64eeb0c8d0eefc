"""A full-size random model that has no room is refused before anything of it is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl_omni.bench import cli, full_size, room
from verl_omni.bench.arguments import parse
from verl_omni.bench.room import GIB
from verl_omni.workers.config import ConfigError

COUNTS = {"transformer": 8 * GIB, "text_encoder": 3 * GIB, "vae": GIB}
"""Parameters."""


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> SimpleNamespace:
    """What is free, in bytes; nothing may be built."""
    free = SimpleNamespace(memory=0, disk=8 * GIB)
    monkeypatch.setattr(full_size, "parameter_counts", lambda family: COUNTS)
    monkeypatch.setattr(room, "free_memory", lambda device: free.memory)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.disk))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cli, "build_random", lambda kind, family, path: pytest.fail("built", pytrace=False))
    monkeypatch.setattr(cli.BenchModel, "open_random", lambda kind, family, path: path)
    return free


def opened(folder: Path, *argv: str) -> object:
    return cli.open_model(parse(["--random", "sd3", *argv], "about"), folder)


@pytest.mark.parametrize(
    ("argv", "element_bytes", "engines"),
    [("", 4, 1), ("--dtype float32", 4, 1), ("--dtype bf16", 2, 1), ("--dtype bfloat16 --replicas 2", 2, 2)],
)
def test_weights_that_do_not_fit_the_free_memory(argv: str, element_bytes: int, engines: int, machine, tmp_path: Path):
    needed = sum(COUNTS.values()) * element_bytes * engines
    machine.memory = needed - GIB
    told = rf"needs about {needed // GIB} GiB for its weights, {needed // GIB - 1} GiB are free; write --tiny sd3"
    with pytest.raises(ConfigError, match=told):
        opened(tmp_path, *argv.split())
    (tmp_path / "random_sd3").mkdir()
    with pytest.raises(ConfigError, match=told):
        opened(tmp_path, *argv.split())
    machine.memory = needed
    assert opened(tmp_path, *argv.split()) == tmp_path / "random_sd3"


def test_a_part_is_drawn_in_float32_whatever_the_dtype(machine, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(COUNTS, "text_encoder", 16 * GIB)
    machine.memory = 63 * GIB
    with pytest.raises(ConfigError, match="needs about 64 GiB"):
        opened(tmp_path, "--dtype", "bf16")


def test_files_that_do_not_fit_the_free_disk(machine, tmp_path: Path):
    machine.memory, machine.disk = 1000 * GIB, 7 * GIB
    with pytest.raises(ConfigError, match=rf"writes about 8 GiB to {tmp_path}, where 7 GiB are free; write --keep"):
        opened(tmp_path)
    (tmp_path / "random_sd3").mkdir()
    assert opened(tmp_path) == tmp_path / "random_sd3"


def test_engine_options_may_spread_the_weights_on_gpus(machine, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "random_sd3").mkdir()
    with pytest.raises(ConfigError, match="0 GiB are free"):
        opened(tmp_path)
    assert opened(tmp_path, "--engine", '{"tensor_parallel_size": 2}')


def test_the_parameters_are_counted_without_being_allocated(monkeypatch):
    monkeypatch.undo()
    counts = full_size.parameter_counts("qwen_image")
    assert counts.keys() == {"transformer", "text_encoder", "vae"}
    config = full_size.TRANSFORMER["qwen_image"]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    products = config["num_layers"] * 2 * (4 + 8 + 6) * width**2  # attention, feed-forward, modulation of two streams
    assert products < counts["transformer"] < 1.01 * products
