"""Whether a run will be able to write what it makes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
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
