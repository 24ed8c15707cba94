"""Charts as inline SVG: lines over steps, bars over positions."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Point = tuple[float, float]

_WIDTH, _HEIGHT = 340, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, _WIDTH - 12, 28, _HEIGHT - 40
"""Edges of the area that is drawn in; titles and the numbers of the axes lie around it."""
_COLOURS = "#2b6cb0", "#d9730d"
_FEW_POINTS = 40
"""A line of so many points or fewer shows each of them."""
_TICKS = 5
"""Numbers on an axis: about as many."""


@dataclass(frozen=True)
class _Axis:
    """Places values between two edges, in pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, least: float = 0.0) -> list[float]:
        """Return multiples of 1, 2 or 5 times a power of ten, and of no less than ``least``."""
        apart = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(apart))
        step = max(least, next(power * times for times in (1, 2, 5, 10) if power * times >= apart))
        return [
            number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        ]


def line_chart(title: str, below: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """Return at most two lines, named where there are two. ``below``: what the x axis counts, in whole numbers.

    The points of a line are in the order of x; those that are not finite are left out.
    """
    shown = {name: [point for point in points if _finite(point)] for name, points in lines.items()}
    every = [point for points in shown.values() for point in points]
    x = _Axis(*_bounds(point[0] for point in every), _LEFT, _RIGHT)
    y = _Axis(*_bounds(point[1] for point in every), _BOTTOM, _TOP)
    marks: list[str] = []
    for number, (name, points) in enumerate(shown.items()):
        marks += _line([(x(a), y(b)) for a, b in points], _COLOURS[number])
        if len(shown) > 1:
            marks.append(
                _text(_RIGHT, _TOP + 10 + 15 * number, name, f'text-anchor="end" fill="{_COLOURS[number]}"')
            )
    return _panel(title, below, x, y, x.ticks(least=1.0), marks)


def bar_chart(title: str, below: str, values: Sequence[float]) -> str:
    """Return a bar for each value between 0 and 1; the first one is number 1."""
    x = _Axis(0.4, len(values) + 0.6, _LEFT, _RIGHT)
    y = _Axis(0.0, 1.0, _BOTTOM, _TOP)
    marks = [
        f'<rect x="{x(number - 0.35):.1f}" y="{y(value):.1f}" width="{x(0.7) - x(0):.1f}" '
        f'height="{_BOTTOM - y(value):.1f}" fill="{_COLOURS[0]}"/>'
        for number, value in enumerate(values, start=1)
        if math.isfinite(value)
    ]
    return _panel(title, below, x, y, x.ticks(least=1.0), marks)


def _finite(point: Point) -> bool:
    return all(map(math.isfinite, point))


def _bounds(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the largest value with some room around them."""
    values = list(values) or [0.0, 1.0]
    low, high = min(values), max(values)
    room = 0.05 * ((high - low) or abs(low) or 1.0)
    return low - room, high + room


def _line(points: Sequence[Point], colour: str) -> Iterator[str]:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(points))
    yield f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
    if len(points) <= _FEW_POINTS:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points)


def _thinned(points: Sequence[Point]) -> Iterator[Point]:
    """Yield of all points in one column of pixels the first, the two extremes and the last: more cannot be seen."""
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    for column in columns.values():
        extremes = {column.index(find(column, key=lambda point: point[1])) for find in (min, max)}
        yield from (column[place] for place in sorted({0, len(column) - 1} | extremes))


def _panel(title: str, below: str, x: _Axis, y: _Axis, x_ticks: Sequence[float], marks: Sequence[str]) -> str:
    parts = [_text((_LEFT + _RIGHT) / 2, 16, title, 'text-anchor="middle" font-size="13"')]
    parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 6, below, 'text-anchor="middle"'))
    for tick in x_ticks:
        parts.append(f'<path d="M{x(tick):.1f} {_TOP}V{_BOTTOM}" stroke="#e4e9f0"/>')
        parts.append(_text(x(tick), _BOTTOM + 16, f"{tick:.6g}", 'text-anchor="middle"'))
    for tick in y.ticks():
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_RIGHT}" stroke="#e4e9f0"/>')
        parts.append(_text(_LEFT - 6, y(tick) + 4, f"{tick:.6g}", 'text-anchor="end"'))
    frame = f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="#5b6675"/>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" font-size="11" fill="#1c2430">'
        f"{''.join((*parts, *marks, frame))}</svg>"
    )


def _text(x: float, y: float, words: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{html.escape(words)}</text>'
