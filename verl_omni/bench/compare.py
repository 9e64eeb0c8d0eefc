"""A record against an earlier one: have the ratios between rows of one run fallen?

Times depend on the machine and on what else it does; ratios within one run much less, and they are what batching is
about. Engines of one mode differ from start to start (on two CPU cores by 20 %), so a record has several rounds. A
ratio counts as fallen if it is lower by more than its tolerance: by as much as the medians of the rounds lie apart in
both of its rows of the earlier record, but at least 15 % and at most 40 % (`TOLERANCES`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_omni.bench.record import POINT, SERIAL, partner
from verl_omni.bench.report import name, table
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.plan import RolloutMode

TOLERANCES = (0.15, 0.4)
"""Least and most: a record may by chance hold rounds that agree, and a noisy one must not excuse anything."""
ALIKE = (
    *("model", "height", "width", "steps", "cfg", "n", "text", "negative_text", "max_sequence_length", "seed"),
    *("dtype", "merge_lora", "engine"),
)
"""What the workloads of two records must agree in to be compared."""
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


def check_record(record: Any) -> None:
    """Raise ValueError where something of the JSON value `record` is missing that :func:`changes` reads."""
    if not (isinstance(record, dict) and {"workload", "rows", "device"} <= record.keys()):
        raise ValueError('it holds no "workload", "rows" and "device"')
    if not (isinstance(record["workload"], dict) and isinstance(record["rows"], list)):
        raise ValueError('"workload" must be an object and "rows" a list')
    for i, row in enumerate(record["rows"]):
        if not (isinstance(row, dict) and row.keys() >= {*POINT} and ("error" in row or _is_measured(row))):
            raise ValueError(f"rows.{i} is not what a row of a record is")


def _is_measured(row: Row) -> bool:
    rounds = row.get("seconds")
    if not (isinstance(rounds, list) and rounds and all(isinstance(seconds, list) and seconds for seconds in rounds)):
        return False
    numbers = [row.get("requests"), row.get("images_per_s"), *(took for seconds in rounds for took in seconds)]
    return all(isinstance(number, (int, float)) and 0 < number < math.inf for number in numbers)


def ratios(record: Mapping[str, Any]) -> dict[str, Ratio]:
    """Name → ratio: each batched row over serial, and step-wise over request-level, all else alike."""
    rows = [row for row in record["rows"] if "error" not in row]
    found: dict[str, Ratio] = {}
    for row in rows:
        others: list[tuple[str, dict[str, Any]]] = []
        if row["mode"] != RolloutMode.SERIAL:
            others.append(("serial", SERIAL))
        if row["mode"] == RolloutMode.STEP_WISE:
            others.append(("request_level", {"mode": RolloutMode.REQUEST_LEVEL.value}))
        for label, change in others:
            if (other := partner(rows, row, change)) is not None:
                value = row["images_per_s"] / other["images_per_s"]
                found[f"{name(row)} / {label}"] = Ratio(value=value, spread=_spread(row) + _spread(other))
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The ratios that both records have. Raises :class:`ConfigError` if they are not about the same, or share none.

    The device may be another.
    """
    _check_alike(before, now)
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


def _check_alike(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Of serial rows the number of requests may differ: each takes as long as the last."""
    old, new = (
        {**{key: record["workload"].get(key) for key in ALIKE}, "attention": record.get("attention")}
        for record in (before, now)
    )
    for key, value in old.items():
        if value != new[key]:
            raise ConfigError(
                f"the baseline was measured with {key} {value}, this run with {new[key]}; measure it anew"
            )
    for row in before["rows"]:
        other = partner(now["rows"], row, {})
        if other is None or row["mode"] == RolloutMode.SERIAL or "error" in {*row, *other}:
            continue
        if row["requests"] != other["requests"]:
            raise ConfigError(
                f"the baseline was measured with {row['requests']} images in a repeat of {name(row)}, this run with "
                f"{other['requests']}; write --requests as in the baseline's command, or measure it anew"
            )


def as_table(found: list[Change]) -> str:
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
