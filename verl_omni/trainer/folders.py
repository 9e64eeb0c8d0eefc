"""The folders that runs write into."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_omni.workers.config import ConfigError


def check_writable(folder: Path, *, key: str, blocked: Sequence[Path] = ()) -> None:
    """Raise :class:`ConfigError` unless files can be written into `folder`, which need not exist yet, and won't after.

    `key` says in the message where the folder comes from; `blocked` are paths found to be in the way.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    nearest = missing[-1].parent if missing else folder
    in_the_way = [*blocked, *([] if nearest.is_dir() else [nearest])]
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


@contextlib.contextmanager
def locked(folder: Path, *, key: str) -> Iterator[None]:
    """Keep `folder`, which is made if missing, to this process while the block runs.

    Raises :class:`ConfigError` while another process has it; `key` says in the message where the folder comes from. The
    lock ends with the process, however it ends, and leaves no file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{key}: another run is writing into {folder}; wait for it, or give another") from None
        yield
    finally:
        os.close(handle)
