"""Images a second over the cap, a curve a mode, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl_omni.bench.report import name
from verl_omni.trainer.diffusion.charts import COLOURS

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 620, 40, 300
_TICKS = 5


def save_plot(record: dict[str, Any], path: str | Path) -> None:
    """Write the plot of a record with at least one measured row."""
    rows = [row for row in record["rows"] if "error" not in row]
    Path(path).write_text("\n".join(_figure(record, curves(rows))) + "\n", encoding="utf-8")


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Name of the curve → cap → row."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(name(row).replace(f" cap {row['max_num_seqs']}", ""), {})[row["max_num_seqs"]] = row
    return found


def _figure(record: dict[str, Any], found: dict[str, dict[int, dict[str, Any]]]) -> Iterator[str]:
    rows = [row for curve in found.values() for row in curve.values()]
    caps = sorted({row["max_num_seqs"] for row in rows})
    top = _round_up(max(row["fastest"] for row in rows))

    def x(cap: int) -> float:
        low, high = math.log2(caps[0]), math.log2(caps[-1])
        share = 0.5 if low == high else (math.log2(cap) - low) / (high - low)
        return LEFT + 20 + share * (RIGHT - LEFT - 40)

    def y(rate: float) -> float:
        return BOTTOM - rate / top * (BOTTOM - TOP)

    load = record["workload"]
    title = f"{load['model']}, {load['height']}×{load['width']}, {load['steps']} steps, {record['device']}"
    height = HEIGHT + 14 * ((len(found) - 1) // 3)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" fill="#333">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>'
    for i in range(_TICKS + 1):
        value = top * i / _TICKS
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    yield from (f'<text x="{x(cap):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{cap}</text>' for cap in caps)
    yield f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 36}" text-anchor="middle">cap (requests in a batch)</text>'
    yield f'<text transform="translate(14 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle">images/s</text>'
    for i, (label, curve) in enumerate(found.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = [(x(cap), y(curve[cap]["images_per_s"])) for cap in sorted(curve)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for (a, b), cap in zip(points, sorted(curve), strict=True):
            row = curve[cap]
            low, high = y(row["slowest"]), y(row["fastest"])
            yield f'<line x1="{a:.1f}" x2="{a:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>'
        left, line = LEFT + 8 + 190 * (i % 3), HEIGHT - 10 + 14 * (i // 3)
        yield f'<text x="{left}" y="{line}" fill="{colour}">{escape(label)}</text>'
    yield "</svg>"


def _round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 3 … 10 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * power >= value)
