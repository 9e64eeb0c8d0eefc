"""How often a worker waits for the device while it serves requests: the GPU idles where that drains its queue."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

_MESSAGE = "called a synchronizing CUDA operation"
_SERVING = ("execute_stepwise", "execute_model_batch", "execute_model")
"""The worker's methods that the engine serves requests by."""


class HostSyncs:
    """Counts the synchronizing calls in a worker's serving methods, and its steps, from :meth:`start` to :meth:`stop`.

    It goes by torch's own sync debug mode, which slows the work down: don't time what is counted. Elsewhere than on
    CUDA nothing waits, and the count is 0.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._pipeline = worker.model_runner.pipeline
        self.syncs = 0
        """Synchronizing calls so far."""
        self.steps = 0
        """Calls of the pipeline's ``denoise_step`` so far."""

    def start(self) -> None:
        """Put the counters around the methods."""
        for name in _SERVING:
            setattr(self._worker, name, self._watched(getattr(self._worker, name)))
        self._pipeline.denoise_step = self._counted(self._pipeline.denoise_step)

    def stop(self) -> dict[str, int]:
        """Take them off; what was counted."""
        for name in _SERVING:
            delattr(self._worker, name)
        del self._pipeline.denoise_step
        return {"syncs": self.syncs, "steps": self.steps}

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return step(*args, **kwargs)

        return counted

    def _watched(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(serve)
        def watched(*args: Any, **kwargs: Any) -> Any:
            cuda = torch.cuda.is_available()
            before = torch.cuda.get_sync_debug_mode() if cuda else 0
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if cuda:
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    return serve(*args, **kwargs)
                finally:
                    if cuda:
                        torch.cuda.set_sync_debug_mode(before)
                    self.syncs += sum(_MESSAGE in str(warning.message) for warning in caught)

        return watched
