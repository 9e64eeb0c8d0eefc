"""Whether a full-size random model has room here, before anything of it is built."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from verl_omni.bench import full_size
from verl_omni.pipelines.memory import free_memory
from verl_omni.workers.config import ConfigError

GIB = 2**30


def check_room(family: str, path: Path, *, dtype: str, device: torch.device, engines: int) -> None:
    """Raise :class:`ConfigError` if the full-size `family` at `path`, or yet to be built there, has no room.

    `engines`: those that hold all their weights, in `dtype`, on `device`.
    """
    counts = full_size.parameter_counts(family)
    written = {name: count for name, count in counts.items() if name != "transformer"}
    is_there = path.is_dir()
    weights = engines * sum(counts.values()) * getattr(torch, dtype).itemsize
    part = 0 if is_there else max(written.values()) * torch.float32.itemsize  # drawn one by one, and written as WRITTEN
    needed, free = max(weights, part), free_memory(device)
    if needed > free:
        raise ConfigError(
            f"--random {family} needs about {needed / GIB:.0f} GiB for its weights, {free / GIB:.0f} GiB are free; "
            f"write --tiny {family}, or run on a GPU with more"
        )
    files, free = sum(written.values()) * full_size.WRITTEN.itemsize, shutil.disk_usage(path.parent).free
    if not is_there and files > free:
        raise ConfigError(
            f"--random {family} writes about {files / GIB:.0f} GiB to {path.parent}, where {free / GIB:.0f} GiB are "
            "free; write --keep and a folder with more room"
        )
