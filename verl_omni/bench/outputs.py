"""The files that one command writes: looked at before anything is measured, and told when they are written."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path

from verl_omni.workers.config import ConfigError

_FILES = {"out": "record.json", "plot": "plot.svg", "profile": "profile.json"}
"""Option → name to propose."""

logger = logging.getLogger(__name__)


class Outputs:
    """Writes files. One that cannot be written is told, and costs nothing of what was measured."""

    def __init__(self) -> None:
        self.written: list[Path] = []
        """In the order in which they were written first."""
        self.failed: list[Path] = []
        """What could not be written when it was last tried."""

    def write(self, path: Path, save: Callable[[Path], object]) -> None:
        """Have `save` write `path`."""
        if path in self.failed:
            self.failed.remove(path)
        try:
            save(path)
        except OSError as error:
            logger.error("%s was not written: %s", path, error)
            self.failed.append(path)
        else:
            self.written += [] if path in self.written else [path]


def check_outputs(args: argparse.Namespace) -> None:
    """Make the folders of what the arguments have written.

    Raises :class:`ConfigError` for what cannot be written, and for files that would overwrite each other.
    """
    taken: dict[Path, str] = {}
    for option in ("baseline", *_FILES):
        path = getattr(args, option)
        if path is None:
            continue
        if (other := taken.setdefault(path.resolve(), option)) != option:
            raise ConfigError(f"--{option} {path} would overwrite --{other}; write another name")
        if option in _FILES:
            _check_file(option, path)
    if args.torch_profile is not None:
        _make_folder(f"--torch-profile {args.torch_profile}", Path(args.torch_profile).parent)
    if args.keep is not None:
        _make_folder(f"--keep {args.keep}", args.keep)


def _check_file(option: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"--{option} {path} is a folder; write the name of a file, like {path / _FILES[option]}")
    _make_folder(f"--{option} {path}", path.parent)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--{option} {path} cannot be written; write another name, or give yourself the right to")


def _make_folder(what: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what}: {folder} is no folder and cannot be made one: {error.strerror}") from error
