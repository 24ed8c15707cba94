"""Charts: every value is where the axes say it is."""

from __future__ import annotations

import math
import re

import pytest

from spec_trainer.chart import bar_chart, line_chart


def drawn(chart: str) -> list[tuple[float, float]]:
    """The points of the first line, in the numbers of the axes."""
    (words,) = re.findall(r'<polyline points="([^"]+)"', chart)[:1]
    x, y = axes(chart)
    return [(x(float(a)), y(float(b))) for a, b in (word.split(",") for word in words.split())]


def axes(chart: str):
    """For each axis what turns pixels into its numbers, read from two of those that it shows."""
    text = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([\d.e+-]+)</text>', chart)
    below = [(float(px), float(shown)) for px, _, anchor, shown in text if anchor == "middle"]
    left = [(float(py) - 4, float(shown)) for _, py, anchor, shown in text if anchor == "end"]

    def scale(ticks):
        (a, first), (b, last) = ticks[0], ticks[-1]
        return lambda pixel: first + (pixel - a) / (b - a) * (last - first)

    return scale(below), scale(left)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 3e6])
@pytest.mark.parametrize("steps", [2, 9, 30])
def test_points_are_where_the_axes_say(steps, scale):
    points = [(float(step), scale * (5 + 3 / step)) for step in range(1, steps + 1)]
    found = drawn(line_chart("loss", "step", {"training": points}))
    assert [x for x, _ in found] == pytest.approx([x for x, _ in points], abs=0.02 * steps)
    assert [y for _, y in found] == pytest.approx([y for _, y in points], abs=0.02 * scale)


def test_two_lines_are_named_and_one_is_not():
    points = [(1.0, 1.0), (2.0, 2.0)]
    assert "training" not in line_chart("loss", "step", {"training": points})
    both = line_chart("loss", "step", {"training": points, "held out": points[1:]})
    assert re.findall(r">(training|held out)<", both) == ["training", "held out"]
    assert both.count("<circle") == 3


def test_of_a_long_line_only_what_can_be_seen_is_written():
    points = [(float(step), math.sin(step)) for step in range(200_000)]
    points[77_777] = (77_777.0, 9.0)
    chart = line_chart("loss", "step", {"training": points})
    assert len(chart) < 30_000
    assert max(y for _, y in drawn(chart)) == pytest.approx(9.0, abs=0.1)


@pytest.mark.parametrize("values", [[], [0.003], [0.003] * 4, [0.0], [math.nan, 1.0], [math.inf]])
def test_whatever_the_values_there_is_a_chart(values):
    points = list(enumerate(values))
    for chart in (line_chart("a < b", "step", {"training": points}), bar_chart("a < b", "position", values)):
        assert "a &lt; b" in chart
        assert not re.search(r"nan|inf", chart)


def test_bars_stand_on_nothing_and_are_as_high_as_their_values():
    chart = bar_chart("accepted", "position", [1.0, 0.5, 0.0])
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill="#2b', chart)]
    assert heights == pytest.approx([heights[0], heights[0] / 2, 0.0])
    assert [number for number in re.findall(r">(\d)</text>", chart) if number in "123"][:3] == ["1", "2", "3"]
