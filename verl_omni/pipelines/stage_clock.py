"""Seconds by stage of the rollout, on the device's own time line."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ROLLOUT_STAGES = ("encode", "denoise", "step", "decode", "transfer")
"""Text encoders; transformer and guidance; SDE step; VAE; tensors on their way to the host."""
_FOLD = 512
"""Spans kept before those that are over are summed up."""


class StageClock:
    """Measures spans of work on `device` without waiting for it: what is launched is timed by events in its stream.

    On a CPU, where work is done when the call returns, by the clock. Stages must not be nested.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the work launched inside as stage `name`."""
        if not self._cuda:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[name] += time.perf_counter() - start
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._open.append((name, first, last))
            if len(self._open) >= _FOLD:
                self._fold()

    def seconds(self) -> dict[str, float]:
        """Seconds by stage since the last reset, of all work launched so far; waits for it."""
        for _, _, last in self._open:
            last.synchronize()
        self._fold()
        return dict(self._seconds)

    def reset(self) -> None:
        """Start again at zero."""
        self._seconds.clear()
        self._open.clear()

    def _fold(self) -> None:
        still = []
        for name, first, last in self._open:
            if last.query():
                self._seconds[name] += first.elapsed_time(last) / 1000
            else:
                still.append((name, first, last))
        self._open = still
