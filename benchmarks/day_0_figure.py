"""Draw the tokens/s over time of a document of ``follow_serving.py --day-0``, as an SVG file.

python benchmarks/day_0_figure.py day.json day.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LABELS = {"live": "draft that learns", "no-draft": "no draft", "ngram": "prompt lookup"}


def draw(day: dict[str, Any], file: Path) -> None:
    """Write the figure of a document's ``day_0``; dotted lines are pushes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.5), layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.add_subplot()
    axis.spines[["top", "right"]].set_visible(False)
    for name, label in LABELS.items():
        rows = day["series"][name]
        times = [(row["begun_s"] + row["at_s"]) / 2 - day["follow_starts_s"] for row in rows]
        axis.plot(times, [row["output_tokens_per_s"] for row in rows], marker=".", label=label)
    for at_s in pushed(day):
        axis.axvline(at_s, color="gray", linestyle=":", linewidth=0.8)
    axis.set(xlabel="seconds since follow started", ylabel="tokens/s", ylim=(0, None))
    axis.legend(frameon=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "day 0"}):
        figure.savefig(file, format="svg", metadata={"Date": None})


def pushed(day: dict[str, Any]) -> list[float]:
    """Return the seconds from the start of ``follow`` to each push."""
    rows = day["verdicts"]
    return [row["at_s"] - day["follow_starts_s"] for row in rows if row["served"] == row["step"]]


def main() -> None:
    """Draw the document that the command line names."""
    source, file = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text())["day_0"], file)


if __name__ == "__main__":
    main()
