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
    stage_s: dict[str, float] = field(default_factory=dict)
    """Seconds on the device by stage, see ``stage_clock.ROLLOUT_STAGES``; of several engines, their sum."""
    compiled_graphs: int = 0
    """Graphs that were compiled: after the warm-up, each is a recompile."""
    out_of_memory: int = 0
    """How often a forward or a decode was repeated in halves for want of memory."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON or another process."""
        return {
            "batch_sizes": dict(sorted(self.batch_sizes.items())),
            "waves": self.waves,
            "encodes": {"requested": self.encodes_requested, "computed": self.encodes_computed},
            "stage_s": dict(self.stage_s),
            "compiled_graphs": self.compiled_graphs,
            "out_of_memory": self.out_of_memory,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RolloutStats:
        """The inverse of :meth:`as_dict`."""
        return cls(
            batch_sizes=Counter({int(size): n for size, n in data["batch_sizes"].items()}),
            waves=data["waves"],
            encodes_requested=data["encodes"]["requested"],
            encodes_computed=data["encodes"]["computed"],
            stage_s=dict(data["stage_s"]),
            compiled_graphs=data["compiled_graphs"],
            out_of_memory=data["out_of_memory"],
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
            for stage, seconds in part.stage_s.items():
                total.stage_s[stage] = total.stage_s.get(stage, 0.0) + seconds
            total.compiled_graphs += part.compiled_graphs
            total.out_of_memory += part.out_of_memory
        return total
