"""Images a second over the cap, a curve a mode, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Axes:
    """Where a cap and a rate stand, in units of the figure."""

    caps: Sequence[int]
    """All that are shown, in rising order."""
    top: float
    """The highest rate, images/s."""

    def x(self, cap: int) -> float:
        low, high = math.log2(self.caps[0]), math.log2(self.caps[-1])
        share = 0.5 if low == high else (math.log2(cap) - low) / (high - low)
        return LEFT + 20 + share * (RIGHT - LEFT - 40)

    def y(self, rate: float) -> float:
        return BOTTOM - rate / self.top * (BOTTOM - TOP)


def _figure(record: dict[str, Any], found: dict[str, dict[int, dict[str, Any]]]) -> Iterator[str]:
    rows = [row for curve in found.values() for row in curve.values()]
    axes = _Axes(sorted({row["max_num_seqs"] for row in rows}), _round_up(max(row["fastest"] for row in rows)))
    load = record["workload"]
    title = f"{load['model']}, {load['height']}×{load['width']}, {load['steps']} steps, {record['device']}"
    height = HEIGHT + 14 * ((len(found) - 1) // 3)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" fill="#333">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>'
    yield from _scales(axes)
    for i, (label, curve) in enumerate(found.items()):
        yield from _curve(axes, curve, COLOURS[i % len(COLOURS)])
        left, line = LEFT + 8 + 190 * (i % 3), HEIGHT - 10 + 14 * (i // 3)
        yield f'<text x="{left}" y="{line}" fill="{COLOURS[i % len(COLOURS)]}">{escape(label)}</text>'
    yield "</svg>"


def _scales(axes: _Axes) -> Iterator[str]:
    for i in range(_TICKS + 1):
        value = axes.top * i / _TICKS
        y = axes.y(value)
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    for cap in axes.caps:
        yield f'<text x="{axes.x(cap):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{cap}</text>'
    yield f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 36}" text-anchor="middle">cap (requests in a batch)</text>'
    yield f'<text transform="translate(14 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle">images/s</text>'


def _curve(axes: _Axes, curve: dict[int, dict[str, Any]], colour: str) -> Iterator[str]:
    points = [(axes.x(cap), axes.y(curve[cap]["images_per_s"])) for cap in sorted(curve)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (a, b), cap in zip(points, sorted(curve), strict=True):
        low, high = axes.y(curve[cap]["slowest"]), axes.y(curve[cap]["fastest"])
        yield f'<line x1="{a:.1f}" x2="{a:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>'


def _round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 3 … 10 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * power >= value)
