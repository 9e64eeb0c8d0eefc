"""Where a person reads what happens."""

from __future__ import annotations

import functools
import logging
import sys
from typing import TextIO

from verl_omni.utils.secrets import ScrubbingFormatter


def log_to_stderr(ours: int = logging.INFO) -> None:
    """What an entry point's process logs, on standard error, without secrets.

    Ours from the level `ours` on (``logging.NOTSET``: as others'), others' from WARNING.
    """
    handler = logging.StreamHandler(own_stderr())
    handler.setFormatter(ScrubbingFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("verl_omni").setLevel(ours)


def own_stdout() -> TextIO:
    """Standard output, but not `sys.stdout`: an engine in this process puts its name before each line of that."""
    return _own(1, sys.stdout)


def own_stderr() -> TextIO:
    """Standard error, in the same way."""
    return _own(2, sys.stderr)


@functools.cache
def _own(descriptor: int, fallback: TextIO) -> TextIO:
    try:
        return open(descriptor, "w", closefd=False, buffering=1, errors="backslashreplace")
    except OSError:  # closed
        return fallback
