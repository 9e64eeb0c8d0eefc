"""Curves over training steps as inline SVG: no script, no font and no file besides."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6000", "#555555")
"""The colours of Okabe and Ito, which colour-blind people tell apart, with a darker yellow and no black."""
WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 66, 548, 10, 202
_TICKS = 5
_MARKED_POINTS = 40
_ZERO = 1e-12  # on a logarithmic axis: far below the rounding of float32 log-probs

Points = Mapping[int, float]
"""Step → value."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve."""

    name: str
    """For the legend."""
    points: Points
    """The curve; steps without a value interrupt nothing."""
    band: Points = field(default_factory=dict)
    """Half the height of the band around the curve, by step."""
    dots: bool = False
    """Points only, not joined."""


def line_chart(
    title: str, series: Sequence[Series], *, log: bool = False, from_zero: bool = False, note: str = ""
) -> str:
    """A figure of the `series` that have points; empty if none has.

    `log`: logarithmic, zeros at the lower edge; `from_zero`: the axis begins at 0, below which nothing lies.
    """
    series = [item for item in series if item.points]
    if not series:
        return ""
    low, high = _log_range(series) if log else _range(series)
    if from_zero:
        low = 0.0
    axes = _Axes(steps=sorted({step for item in series for step in item.points}), low=low, high=high, log=log)
    body = list(axes.draw())
    for item, colour in zip(series, _colours(len(series)), strict=True):
        body += _curve(item, colour, axes)
    hints = {
        step: [f"{item.name}: {_full(item.points[step])}" for item in series if step in item.points]
        for step in axes.steps
    }
    return _figure(title, [item.name for item in series], [*body, *axes.hints(hints)], note)


def stacked_chart(title: str, parts: Mapping[str, Points], *, note: str = "") -> str:
    """A figure of columns, one a step, in which the `parts` stand on each other; empty if there are none."""
    parts = {name: points for name, points in parts.items() if points}
    steps = sorted({step for points in parts.values() for step in points})
    totals = {step: sum(points.get(step, 0.0) for points in parts.values()) for step in steps}
    if not steps:
        return ""
    axes = _Axes(steps=steps, low=0.0, high=max(totals.values()) or 1.0, log=False)
    body, below = list(axes.draw()), dict.fromkeys(steps, 0.0)
    for (_, points), colour in zip(parts.items(), _colours(len(parts)), strict=True):
        for step, value in points.items():
            top, base = axes.y(below[step] + value), axes.y(below[step])
            body.append(
                f'<rect x="{axes.x(step) - axes.pitch * 0.45:.1f}" y="{top:.1f}" width="{axes.pitch * 0.9:.1f}" '
                f'height="{base - top:.1f}" fill="{colour}"/>'
            )
            below[step] += value
    hints = {
        step: [f"{name}: {_full(points[step])}" for name, points in parts.items() if step in points] for step in steps
    }
    return _figure(title, list(parts), [*body, *axes.hints(hints)], note)


@dataclass(frozen=True, kw_only=True)
class _Axes:
    steps: list[int]
    low: float
    high: float
    log: bool

    @property
    def pitch(self) -> float:
        """Pixels between two steps, if they were evenly spread."""
        return (RIGHT - LEFT) / len(self.steps)

    def x(self, step: float) -> float:
        first, last = self.steps[0], self.steps[-1]
        left, right = LEFT + self.pitch / 2, RIGHT - self.pitch / 2
        return (left + right) / 2 if first == last else left + (step - first) / (last - first) * (right - left)

    def y(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    def draw(self) -> Iterator[str]:
        """Grid lines with the values beside them, and steps below."""
        values = _decades(self.low, self.high) if self.log else _ticks(self.low, self.high)
        for value, label in zip(values, _labels(values, self.log), strict=True):
            y = self.y(value)
            yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        marks = sorted({round(tick) for tick in _ticks(self.steps[0], self.steps[-1])})
        for step in (mark for mark in marks if self.steps[0] <= mark <= self.steps[-1]):
            yield f'<text x="{self.x(step):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{step}</text>'

    def hints(self, texts: Mapping[int, Sequence[str]]) -> Iterator[str]:
        """What a browser shows under the pointer."""
        for step, lines in texts.items():
            text = escape("\n".join([f"step {step}", *lines]))
            yield (
                f'<rect x="{self.x(step) - self.pitch / 2:.1f}" y="{TOP}" width="{self.pitch:.1f}" '
                f'height="{BOTTOM - TOP}" fill="transparent"><title>{text}</title></rect>'
            )


def _curve(item: Series, colour: str, axes: _Axes) -> Iterator[str]:
    steps = sorted(item.points)
    middle = [(axes.x(step), axes.y(item.points[step])) for step in steps]
    if item.band:
        upper, lower = (
            [(axes.x(step), axes.y(item.points[step] + sign * item.band[step])) for step in steps if step in item.band]
            for sign in (1, -1)
        )
        yield f'<polygon points="{_path([*upper, *reversed(lower)])}" fill="{colour}" opacity="0.15"/>'
    if not item.dots:
        yield f'<polyline points="{_path(middle)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    if item.dots or len(steps) <= _MARKED_POINTS:
        radius = 4 if item.dots else 2
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in middle)


def _figure(title: str, names: Sequence[str], body: Sequence[str], note: str) -> str:
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in zip(names, _colours(len(names)), strict=True)
    )
    return (
        f'<figure><figcaption><b>{escape(title)}</b><div class="legend">{legend}</div></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
        f"<p>{escape(note)}</p></figure>"
    )


def _colours(count: int) -> list[str]:
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [f"hsl({240 * (1 - index / (count - 1)):.0f} 75% 42%)" for index in range(count)]  # blue … red


def _log_range(series: Sequence[Series]) -> tuple[float, float]:
    """The decades that hold all values above `_ZERO`."""
    positive = [value for item in series for value in item.points.values() if value > _ZERO] or [_ZERO]
    low = 10.0 ** math.floor(math.log10(min(positive)))
    high = 10.0 ** math.ceil(math.log10(max(positive)))
    return low, high if high > low else low * 10


def _range(series: Sequence[Series]) -> tuple[float, float]:
    """From the lowest to the highest value, bands included, with a margin."""
    ends = [
        value + sign * item.band.get(step, 0.0)
        for item in series
        for step, value in item.points.items()
        for sign in (1, -1)
    ]
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.05 or abs(high) * 0.5 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """About `_TICKS` round values from `low` to `high`."""
    rough = (high - low) / _TICKS
    if rough < sys.float_info.min:  # nothing between them
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**power for power in range(first, last + 1, math.ceil((last - first) / 6) or 1)]


def _labels(values: Sequence[float], log: bool) -> list[str]:
    """The values with as many digits as tell them apart."""
    largest = max(map(abs, values))
    if log or (largest and largest < 1e-3) or largest >= 1e6:
        return [f"{value:.3g}" for value in values]
    spacing = values[1] - values[0] if len(values) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return [f"{value + 0.0:.{digits}f}" for value in values]


def _full(value: float) -> str:
    return f"{value:.8g}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
