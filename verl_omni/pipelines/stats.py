"""What really happened in the engine: counted by the adapter, read by the worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class RolloutStats:
    """Counters since the start or the last reset."""

    batch_sizes: dict[int, int] = field(default_factory=Counter)
    """Rows in one conditional transformer forward → how many such forwards ran."""
    waves: int = 0
    """How often denoising started with nothing in flight."""
    encodes_requested: int = 0
    """Prompts, negative ones included, that requests asked to be encoded."""
    encodes_computed: int = 0
    """Of those, the ones that a text encoder had to compute."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON or another process."""
        return {
            "batch_sizes": dict(sorted(self.batch_sizes.items())),
            "waves": self.waves,
            "encodes": {"requested": self.encodes_requested, "computed": self.encodes_computed},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RolloutStats:
        """The inverse of :meth:`as_dict`."""
        return cls(
            batch_sizes=Counter({int(size): n for size, n in data["batch_sizes"].items()}),
            waves=data["waves"],
            encodes_requested=data["encodes"]["requested"],
            encodes_computed=data["encodes"]["computed"],
        )

    @classmethod
    def merged(cls, parts: Iterable[RolloutStats]) -> RolloutStats:
        """The sum over several engines."""
        total = cls()
        for part in parts:
            total.batch_sizes = Counter(total.batch_sizes) + Counter(part.batch_sizes)
            total.waves += part.waves
            total.encodes_requested += part.encodes_requested
            total.encodes_computed += part.encodes_computed
        return total

    def reset(self) -> None:
        """Set every counter to zero."""
        self.batch_sizes, self.waves, self.encodes_requested, self.encodes_computed = Counter(), 0, 0, 0
