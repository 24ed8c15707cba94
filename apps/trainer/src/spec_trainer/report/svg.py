"""Draw the plots of a report as inline SVG.

Each panel is a separate image, so that panels wrap on narrow screens.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Plot = Callable[["Axes"], None]
"""Draws a plot into the axes of a panel."""
Points = Sequence[tuple[float, float]]

_AXES = (0.2, 0.17, 0.77, 0.66)
"""Left, bottom, width and height of the axes, as shares of a panel; they leave space for tick labels of seven digits,
axis labels and title. They are fixed, because matplotlib's automatic layouts draw each panel twice."""

_TICKS = 4
"""Largest number of intervals between ticks. A tick with its label takes longer to draw than a curve."""


def svg(plots: Sequence[Plot]) -> str:
    """Return the HTML of a row of plots.

    Without matplotlib, which is an extra, the HTML is a line that says how to get them.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "<p>The plots need matplotlib: <code>pip install 'spec-trainer[plots]'</code></p>"
    return f"<div class=panels>{''.join(map(_panel, plots))}</div>"


def curves(
    title: str,
    x_label: str,
    points: Mapping[str, Points],
    lines: Mapping[str, str] | None = None,
    level: float | None = None,
    **limits: Any,
) -> Plot:
    """Return a plot with a curve for each label in ``points`` that has any; several get a legend.

    ``lines``: label -> matplotlib's format of the curve, by default with dots. ``level``: height of a thin line for
    comparison. ``limits``: limits and scales of the axes.
    """

    def draw(axes: Axes) -> None:
        shown = {label: own for label, own in points.items() if own}
        for label, own in shown.items():
            axes.plot(*zip(*own, strict=True), (lines or {}).get(label, "o-"), ms=4, lw=1.2, label=label)
        if level is not None:
            axes.axhline(level, color="black", lw=0.8)
        axes.set(title=title, xlabel=x_label, **limits)
        if len(shown) > 1:
            axes.legend(frameon=False)

    return draw


def bars(title: str, shares: Sequence[float]) -> Plot:
    """Return a plot of a share for each draft position."""

    def draw(axes: Axes) -> None:
        axes.bar(range(1, len(shares) + 1), shares, width=0.7)
        axes.set(title=title, xlabel="draft position", ylim=(0, 1))
        axes.locator_params(axis="x", integer=True)

    return draw


def _panel(plot: Plot) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 3.0))
    FigureCanvasSVG(figure)
    axes = figure.add_axes(_AXES)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.locator_params(nbins=_TICKS)
    plot(axes)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # letters stay letters, not outlines
        figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
