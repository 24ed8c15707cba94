"""Draw the plots of a report as inline SVG.

Each panel is a separate image, so that panels wrap on narrow screens.
"""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_AXES = (0.2, 0.17, 0.77, 0.66)
"""Left, bottom, width and height of the axes, as shares of a panel; they leave space for tick labels of seven digits,
axis labels and title. They are fixed, because matplotlib's automatic layouts draw each panel twice."""

_TICKS = 4
"""Largest number of intervals between ticks. A tick with its label takes longer to draw than a curve."""


def svg(draw: Callable[[Sequence[Axes]], None], panels: int) -> str:
    """Return the HTML of a row of ``panels`` plots; ``draw`` is called once with the axes of all plots.

    Without matplotlib, which is an extra, the HTML is a line that says how to get them.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "<p>The plots need matplotlib: <code>pip install 'spec-trainer[plots]'</code></p>"
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figures = [Figure(figsize=(4.2, 3.0)) for _ in range(panels)]
    axes: list[Axes] = []
    for figure in figures:
        FigureCanvasSVG(figure)
        axis = figure.add_axes(_AXES)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.locator_params(nbins=_TICKS)
        axes.append(axis)
    draw(axes)
    return f"<div class=panels>{''.join(map(_text, figures))}</div>"


def _text(figure: Figure) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # letters stay letters, not outlines
        figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
