"""``metrics.jsonl``: one JSON object a training step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"

Row = dict[str, Any]
"""``step`` (int) and the metrics of that step (float, or None where the value was no finite number)."""


class MetricsFile:
    """Appends to ``metrics.jsonl`` in `folder`. Each line is with the operating system once :meth:`write` returns.

    Of the lines that an earlier run left, those of the steps 0 … `keep` stay; None: none of them. So the lines of a run
    that was killed and went on from a checkpoint are those of a run that never was.
    """

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        rows = [] if keep is None else [row for row in read_metrics(folder) if row["step"] <= keep]
        part = folder / f"{METRICS}.part"
        part.write_bytes(b"".join(map(_line, rows)))
        os.replace(part, folder / METRICS)
        self._row: Row = rows[-1] if rows else {"step": -1}
        self._file = open(folder / METRICS, "r+b", buffering=0)  # noqa: SIM115 - held until close()
        self._start = self._file.seek(0, os.SEEK_END) - (len(_line(rows[-1])) if rows else 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of `step`; those of the step that was last written are merged into its line.

        Raises ValueError for an earlier step, TypeError for a value that is no number.
        """
        if step < self._row["step"]:
            raise ValueError(f"step {step} comes after step {self._row['step']}; steps are logged in order")
        values = {name: _finite(name, value) for name, value in metrics.items()}
        if step > self._row["step"]:
            self._start = self._file.seek(0, os.SEEK_END)
            self._row = {"step": step}
        self._row |= values
        self._file.seek(self._start)
        self._file.write(_line(self._row))
        self._file.truncate()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(folder: str | Path) -> list[Row]:
    """The lines of ``metrics.jsonl`` in `folder`, none if there is no such file; a line cut short is left out."""
    path = Path(folder) / METRICS
    if not path.is_file():
        return []
    rows: list[Row] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # the process was killed while it wrote
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _finite(name: str, value: Any) -> float | None:
    """JSON has neither NaN nor infinity."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    return number if math.isfinite(number) else None
