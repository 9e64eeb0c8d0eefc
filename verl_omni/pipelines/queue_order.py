"""Which waiting request is served next, where only requests of one key can share a batch. No clock, no engine.

First come, first served, but those of the batch's key go ahead of the others: of the key that runs, or, with nothing
running, of the oldest request's. So a queue of mixed sizes is served size by size, in full batches. A request that was
overtaken by `OVERTAKEN_BATCHES` full batches is overtaken no more: its key is next, and until then nothing is admitted.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

OVERTAKEN_BATCHES = 2
"""With as many, a size that keeps coming fills its batches twice before another one has to wait no longer."""


class QueueOrder:
    """Keeps count of who was overtaken how often."""

    def __init__(self) -> None:
        self._overtaken: dict[str, int] = {}

    def arrange(
        self, waiting: Sequence[tuple[str, Hashable]], running: Hashable | None, *, max_batch: int
    ) -> list[str]:
        """Ids in the order in which they are to be served.

        Args:
            waiting: id and key, in the order of arrival.
            running: key of the batch that runs; None if nothing does.
            max_batch: requests in a batch at most.
        """
        if not waiting:
            return []
        lead = waiting[0][1] if running is None else running
        limit = OVERTAKEN_BATCHES * max_batch
        late = [key for request, key in waiting if key != lead and self._overtaken.get(request, 0) >= limit]
        lead = late[0] if late else lead
        return [request for request, key in waiting if key == lead] + [r for r, key in waiting if key != lead]

    def admitted(self, admitted: Collection[str], waiting: Sequence[str]) -> None:
        """`admitted` of `waiting`, which is in the order of arrival, have left the queue; the others were overtaken."""
        after = len(admitted)
        for request in waiting:
            if request in admitted:
                after -= 1
                self._overtaken.pop(request, None)
            elif after:
                self._overtaken[request] = self._overtaken.get(request, 0) + after

    def forget(self, request: str) -> None:
        """`request` is no longer there."""
        self._overtaken.pop(request, None)
