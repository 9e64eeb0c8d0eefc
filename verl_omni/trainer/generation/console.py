"""Where a person reads what happens."""

from __future__ import annotations

import functools
import sys
from typing import TextIO


@functools.cache
def own_stderr() -> TextIO:
    """Standard error, but not `sys.stderr`: an engine in this process puts its name before each line of that."""
    try:
        return open(2, "w", closefd=False, buffering=1, errors="backslashreplace")
    except OSError:  # closed
        return sys.stderr
