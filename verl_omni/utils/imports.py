"""Imports of large libraries."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Pauses the garbage collector around an import, and leaves what it brought to the system at the process's end.

    The modules of vLLM are a million objects that stay; walking them again and again while they come is a quarter of
    the time that the import takes, and collecting them when the process ends is seconds of waiting for nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, so that only full collections walk them
            gc.enable()
        atexit.unregister(gc.freeze)  # once, and ahead of what was registered by the import
        atexit.register(gc.freeze)
