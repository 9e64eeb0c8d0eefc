"""A record against an earlier one: have the ratios between rows of one run fallen?

Times depend on the machine and on what else it does; ratios within one run much less, and they are what batching is
about. Engines of one mode differ from start to start (on two CPU cores by 20 %), so a record has several rounds. A
ratio counts as fallen if it is lower by more than its tolerance: by as much as the medians of the rounds lie apart in
both of its rows of the earlier record, but within `TOLERANCES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_omni.bench.record import POINT
from verl_omni.bench.report import name, table
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.plan import RolloutMode

TOLERANCES = (0.15, 0.4)
"""Least and most: a record may by chance hold rounds that agree, and a noisy one must not excuse anything."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Speed of one row over that of another."""

    value: float
    spread: float
    """How far the rounds of the two rows lie apart, relative, summed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A ratio then and now."""

    name: str
    before: float
    now: float
    tolerance: float

    @property
    def fallen(self) -> bool:
        """Whether it is lower by more than the tolerance."""
        return self.now < self.before * (1 - self.tolerance)


def ratios(record: Mapping[str, Any]) -> dict[str, Ratio]:
    """Name → ratio: each batched row over serial, and step-wise over request-level, all else alike."""
    rows = {tuple(row[key] for key in POINT): row for row in record["rows"] if "error" not in row}
    found: dict[str, Ratio] = {}
    for row in rows.values():
        others: list[tuple[str, dict[str, Any]]] = []
        if row["mode"] != RolloutMode.SERIAL:
            others.append(("serial", {"mode": RolloutMode.SERIAL.value, "max_num_seqs": 1}))
        if row["mode"] == RolloutMode.STEP_WISE:
            others.append(("request_level", {"mode": RolloutMode.REQUEST_LEVEL.value}))
        for label, change in others:
            other = rows.get(tuple({**row, **change}[key] for key in POINT))
            if other is not None:
                value = row["images_per_s"] / other["images_per_s"]
                found[f"{name(dict(row))} / {label}"] = Ratio(value=value, spread=_spread(row) + _spread(other))
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The ratios that both records have. Raises :class:`ConfigError` if they are not about the same, or share none."""
    for key in ("model", "height", "width", "steps", "cfg", "n", "text", "negative_text", "dtype"):
        old, new = before["workload"].get(key), now["workload"].get(key)
        if old != new:
            raise ConfigError(f"the baseline was measured with {key} {old}, this run with {new}; measure it anew")
    old_ratios, new_ratios = ratios(before), ratios(now)
    low, high = TOLERANCES
    found = [
        Change(name=key, before=old.value, now=new_ratios[key].value, tolerance=min(high, max(low, old.spread)))
        for key, old in old_ratios.items()
        if key in new_ratios
    ]
    if not found:
        raise ConfigError(f"the baseline shares no ratio with this run; it has {', '.join(old_ratios) or 'none'}")
    return found


def told(found: list[Change]) -> str:
    """The changes as a table, with a verdict a line."""
    head = ["ratio", "baseline", "now", "may fall to", ""]
    lines = [
        [
            change.name,
            f"{change.before:.2f}",
            f"{change.now:.2f}",
            f"{change.before * (1 - change.tolerance):.2f}",
            "FALLEN" if change.fallen else "ok",
        ]
        for change in found
    ]
    return table([head, *lines])


def _spread(row: Row) -> float:
    """How far the slowest round lies below the fastest, relative; 0 for one round."""
    medians = [statistics.median(seconds) for seconds in row["seconds"]]
    return 1 - min(medians) / max(medians)
