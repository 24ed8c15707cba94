"""Pictures of a report: inline SVG. Each panel is an image, so that on a phone they stand below one another."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_AXES = (0.2, 0.17, 0.77, 0.66)
"""Left, bottom, width, height as shares of a panel: room for numbers of seven digits, both names, and a factor
below the title. To find such a place, matplotlib's own layouts draw each panel twice."""


def svg(draw: Callable[[Sequence[Axes]], None], panels: int) -> str:
    """Return a row of panels that ``draw`` fills."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figures = [Figure(figsize=(4.2, 3.0)) for _ in range(panels)]
    axes: list[Axes] = []
    for figure in figures:
        FigureCanvasSVG(figure)
        axis = figure.add_axes(_AXES)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
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
