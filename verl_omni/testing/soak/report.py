"""The record of soaks as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = (
    "model, mode",
    "requests",
    "successes",
    "checked",
    "largest difference",
    "errors",
    "retried",
    "swaps, refused, sleeps, kills",
    "a kill is noticed within (s)",
    "waves",
    "rows a forward",
    "memory by quarter (MiB)",
    "violations",
)
MODELS = {"qwen_image": "Qwen-Image", "sd3": "SD3.5"}
SHORT = {"this process": "caller", "the engine's process": "engine"}
ENDED = ("aborted", "cancelled", "died", "asleep")
"""Kinds of errors that are no fault of a request."""


def as_table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line a record."""
    rows = [HEAD, *map(cells, records)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(HEAD), *lines[1:]])


def cells(record: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    errors = record["errors"]
    faulty = sum(count for kind, count in errors.items() if kind not in ENDED)
    told = [f"{faulty} faulty", *(f"{errors[kind]} {kind}" for kind in ENDED if kind in errors)]
    memory = [
        f"{SHORT[process]} {' '.join(f'{mean:.0f}' for mean in means)}"
        for process, means in record["memory_mib_by_quarter"].items()
        if means
    ]
    return (
        f"{MODELS[record['family']]}, {record['mode']}",
        str(record["requests"]),
        str(record["successes"]),
        str(record["checked"]),
        f"{record['largest_difference']:.1g}",
        ", ".join(told),
        str(record["retried"]),
        ", ".join(str(record[name]) for name in ("swaps", "refused", "sleeps", "kills")),
        f"{max(record['death_s']):.1f}" if record["death_s"] else "",
        str(record["waves"]),
        f"{record['batch_size_mean']:.1f}",
        "; ".join(memory) or "too short to tell",
        str(len(record["violations"])),
    )
