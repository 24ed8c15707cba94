"""Write the page of ``evaluate --server --report``: figures and plots, in the style of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_trainer.measure.evaluation.evaluation_page import lines_under, load_plots, position_plot
from spec_trainer.measure.server.tables import server_lines
from spec_trainer.report.html import figures, text
from spec_trainer.report.page import origin, page, warnings


def server_page(document: Mapping[str, Any]) -> str:
    """Return the page of a document of ``evaluate --server --json``."""
    shown = [
        ("acceptance length τ", document["acceptance_length"], "{:.2f}"),
        ("generated tokens", document["generated_tokens"], "{:,}"),
    ]
    return page(
        "Evaluation of a server",
        [
            "<h1>Evaluation of a server</h1>",
            f"<p class=lead>temperature {document['temperature']:g}<br>asked from here: {text(origin(document))}</p>",
            figures(shown),
            warnings(document),
            lines_under("Figures", server_lines(document)),
            position_plot(document),
            load_plots(document),
        ],
    )
