"""Image sizes as labels of a run's figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_omni.workers.rollout.request import RolloutRequest, RolloutSample

MAX_SIZES = 32
"""Image sizes with figures of their own; further ones are counted together, as each costs memory here and there."""


class SizeLabels:
    """Names of the sizes of a run: the first `MAX_SIZES` that it meets have one of their own."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, request: RolloutRequest) -> str:
        """``512x768``: width and height, ``default`` for one that is left to the adapter; ``other`` for further sizes.

        Anything else that a row may hold is no size, but ``invalid``.
        """
        edges = (request.width, request.height)
        if any(edge is not None and (not isinstance(edge, int) or isinstance(edge, bool)) for edge in edges):
            return "invalid"
        size = "x".join("default" if edge is None else f"{edge}" for edge in edges)
        if size not in self._known and len(self._known) == MAX_SIZES:
            return "other"
        self._known.add(size)
        return size

    def waits(self, samples: Iterable[tuple[RolloutRequest, RolloutSample]]) -> dict[str, list[float]]:
        """Seconds that the requests waited for a place in a batch, by size; unknown waits are left out."""
        waits: dict[str, list[float]] = {}
        for request, sample in samples:
            if sample.queue_wait_s is not None:
                waits.setdefault(self.of(request), []).append(sample.queue_wait_s)
        return waits
