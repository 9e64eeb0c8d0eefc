"""The record as tables of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from verl_omni.bench.record import POINT, STAGES
from verl_omni.utils.console import own_stdout
from verl_omni.workers.rollout.measured import STILL_RISING, still_rises

_USUAL = {"replicas": 1, "lora_rank": 0, "arrivals": "burst"}
"""Columns that are left out where every row has this value."""
_RATIOS = {
    "times_serial": "× serial",
    "times_no_lora": "× no LoRA",
    "times_burst": "× burst",
    "times_one_replica": "× one replica",
}


def tables(record: dict[str, Any]) -> str:
    """Speed, time by stage, where larger caps may be faster and what could not be measured, in aligned columns."""
    rows = [row for row in record["rows"] if "error" not in row]
    failed = [row for row in record["rows"] if "error" in row]
    parts = [table(cells) for cells in (speed(rows), stages(rows), gaps(rows)) if len(cells) > 1]
    parts += [f"{name(row)} is the largest cap measured; {STILL_RISING}" for row in rising(record["rows"])]
    parts += [f"not measured: {name(row)}: {row['error']}" for row in failed]
    rounds = record["workload"].get("rounds", 1)
    for row in rows:
        for number, reason in row.get("failed_rounds", {}).items():
            parts.append(f"not complete: {name(row)}, round {number} of {rounds}: {reason}")
    return "\n\n".join(parts)


def speed(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table of speeds, a list of cells a row, its head first."""
    ratios = [ratio for ratio in _RATIOS if any(ratio in row for row in rows)]
    head = ["images/s", "slowest–fastest", *(_RATIOS[ratio] for ratio in ratios)]
    head += ["MFU", "GiB", "recompiles", "syncs/step", "rows in a forward: forwards"]
    lines = [head, *(_speed(row, ratios) for row in rows)]
    return [[*about, *line] for about, line in zip(_about(rows), lines, strict=True)]


def _about(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The leading cells, which tell what a row is about; their head first."""
    shown = [column for column, usual in _USUAL.items() if any(row[column] != usual for row in rows)]
    head = ["mode", "cap", *(column.replace("lora_rank", "LoRA rank") for column in shown)]
    return [head, *([row["mode"], str(row["max_num_seqs"]), *(str(row[column]) for column in shown)] for row in rows)]


def _speed(row: dict[str, Any], ratios: Sequence[str]) -> list[str]:
    return [
        f"{row['images_per_s']:.3g}",
        f"{row['slowest']:.3g}–{row['fastest']:.3g}",
        *(f"{row[ratio]:.2f}" if ratio in row else "" for ratio in ratios),
        _known(row["mfu"], ".1%"),
        _known(row["peak_memory_gib"], ".1f"),
        _known(row["recompiles"], "d"),
        _known(row["syncs_per_step"], ".3g"),
        ", ".join(_sizes(row["batch_sizes"])),
    ]


def stages(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table of milliseconds an image and stage, a list of cells a row, its head first."""
    known = [row for row in rows if row["stage_s"] is not None]
    head, *abouts = _about(known)
    lines = [[*head, *(f"{stage} ms" for stage in STAGES)]]
    for about, row in zip(abouts, known, strict=True):
        images = row["requests"] / row["replicas"]
        lines.append([*about, *(f"{1000 * row['stage_s'][stage] / images:.3g}" for stage in STAGES)])
    return lines


def gaps(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table of |Δ log p| against a row alone, mean and largest by step, a list of cells a row, its head first."""
    found = [row for row in rows if "log_prob_gap" in row]
    steps = sorted({int(step) for row in found for by_step in row["log_prob_gap"].values() for step in by_step})
    head, *abouts = _about(found)
    lines = [[*head, "rows in a forward", *(f"step {step}" for step in steps)]]
    for about, row in zip(abouts, found, strict=True):
        for rows_in_forward, by_step in row["log_prob_gap"].items():
            cells = (by_step.get(str(step)) for step in steps)
            shown = ("" if cell is None else f"{cell[0]:.1e}, {cell[1]:.1e}" for cell in cells)
            lines.append([*about, rows_in_forward, *shown])
    return lines


def rising(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of rows that differ in the cap alone, the one with the largest, where speed still rises at it."""
    alike = defaultdict[tuple[Any, ...], dict[int, dict[str, Any]]](dict)
    for row in rows:
        alike[tuple(row[column] for column in POINT if column != "max_num_seqs")][row["max_num_seqs"]] = row
    for by_cap in alike.values():
        rates = {cap: row["images_per_s"] for cap, row in by_cap.items() if "error" not in row}
        if still_rises(rates, by_cap.keys() - rates.keys()):
            yield by_cap[max(rates)]


def table(cells: Sequence[Sequence[str]]) -> str:
    """Cells in aligned columns: the first to the left, as is a last one of text, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1 if any(" " in line[-1] for line in cells[1:]) else 0
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def name(row: dict[str, Any]) -> str:
    """A row's point in words."""
    words = [f"{row['mode']} cap {row['max_num_seqs']}"]
    words += [f"{column} {row[column]}" for column, usual in _USUAL.items() if row[column] != usual]
    return ", ".join(words)


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _sizes(batch_sizes: dict[Any, int], most: int = 4) -> Iterator[str]:
    """The sizes that ran most often, in order of size."""
    often = sorted(batch_sizes, key=lambda size: -batch_sizes[size])[:most]
    yield from (f"{size}: {batch_sizes[size]}" for size in sorted(often, key=int))
    if len(batch_sizes) > most:
        yield f"{len(batch_sizes) - most} more"


def say(text: str) -> None:
    """Print without the name that an engine in this process puts before each line."""
    print(text, file=own_stdout())
