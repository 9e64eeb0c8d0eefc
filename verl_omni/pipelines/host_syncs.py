"""How often a pipeline waits for the device while it denoises: each wait leaves the GPU without work for a moment."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

_MESSAGE = "called a synchronizing CUDA operation"


class HostSyncs:
    """Counts the synchronizing calls within a pipeline's ``denoise_step``, from :meth:`start` to :meth:`stop`.

    It goes by torch's own sync debug mode, which slows the loop down: don't time what is counted. Elsewhere than on
    CUDA nothing waits, and the count is 0.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.syncs = 0
        """Synchronizing calls so far."""
        self.steps = 0
        """Calls of ``denoise_step`` so far."""

    def start(self) -> None:
        """Put the counter around the step."""
        self._pipeline.denoise_step = self._counted(type(self._pipeline).denoise_step)

    def stop(self) -> dict[str, int]:
        """Take it off; what was counted."""
        del self._pipeline.denoise_step
        return {"syncs": self.syncs, "steps": self.steps}

    def _counted(self, step: Any) -> Any:
        @functools.wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            cuda = torch.cuda.is_available()
            before = torch.cuda.get_sync_debug_mode() if cuda else 0
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if cuda:
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    return step(self._pipeline, *args, **kwargs)
                finally:
                    if cuda:
                        torch.cuda.set_sync_debug_mode(before)
                    self.steps += 1
                    self.syncs += sum(_MESSAGE in str(warning.message) for warning in caught)

        return counted
