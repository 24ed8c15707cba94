"""Pictures of a report: inline SVG. Each panel is an image, so that on a phone they stand below one another."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def svg(draw: Callable[[Sequence[Axes]], None], panels: int) -> str:
    """Return a row of panels that ``draw`` fills."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figures = [Figure(figsize=(4.2, 3.0), layout="constrained") for _ in range(panels)]
    axes: list[Axes] = []
    for figure in figures:
        FigureCanvasSVG(figure)
        axis = figure.add_subplot()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axes.append(axis)
    draw(axes)
    return f"<div class=panels>{''.join(map(_text, figures))}</div>"


def _text(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
