"""Where a person reads what happens."""

from __future__ import annotations

import functools
import sys
from typing import TextIO


@functools.cache
def own_stderr() -> TextIO:
    """Standard error as a stream of our own: an engine in this process puts its worker's name into every line of sys.stderr."""
    try:
        return open(2, "w", closefd=False, buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")  # noqa: SIM115
    except (OSError, AttributeError):  # closed or replaced, as under a test runner
        return sys.stderr
