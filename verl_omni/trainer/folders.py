"""The folders that runs write into."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_omni.utils.locks import held
from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.base import MAX_NAME


def check_writable(folder: Path, *, key: str, files: Sequence[str] = (), folders: Sequence[str] = ()) -> None:
    """Raise :class:`ConfigError` unless files can be written into `folder`, which need not exist yet, and won't after.

    `key` says in the message where the folder comes from; `files` and `folders` are names of what will be written in
    it. None of them may be the other kind, nor a link to a place outside.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    nearest = missing[-1].parent if missing else folder
    in_the_way = [folder / name for name in files if (folder / name).is_dir()]
    in_the_way += [folder / name for name in folders if (folder / name).exists() and not (folder / name).is_dir()]
    in_the_way += [] if nearest.is_dir() else [nearest]
    for path in (folder / name for name in (*files, *folders)):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{key}: {path} is a link to {path.resolve()}, outside the folder; remove it")
    if in_the_way:
        raise ConfigError(f"{key}: {in_the_way[0]} is in the way; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{key} cannot be written: {error}; give another folder") from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def plain_name(name: str) -> str:
    """`name`, if it names a file in whichever folder it is used. Raises :class:`ConfigError` if it leads elsewhere."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > MAX_NAME:
        shown = f"{name!r}"
        raise ConfigError(f"{shown[:80]} names no file: it must be short, and without / and NUL")
    return name


@contextlib.contextmanager
def locked(folder: Path, *, key: str) -> Iterator[None]:
    """Keep `folder`, which is made if missing, to this process while the block runs.

    Raises :class:`ConfigError` while another process has it; `key` says in the message where the folder comes from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder) as ours:
        if not ours:
            raise ConfigError(f"{key}: another run is writing into {folder}; wait for it, or give another")
        yield
