"""Write the sections of a report about drafts that were pushed to servers or judged on requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spec_trainer.report.html import number_table
from spec_trainer.report.svg import curves, svg
from spec_trainer.run.records import length_of_served

Record = dict[str, Any]

_PLOTTED_LABELS = 8
"""Largest number of labels of one plot: the labels with the most held-out requests."""


def pushes(records: Sequence[Record], summary: Mapping[str, Any]) -> str:
    """Return a table with the outcome of each version that was pushed to running servers."""
    outcomes: dict[int, Record] = {}
    for record in (*records, *summary.get("last_pushes", ())):
        if "push_version" in record:  # acceptance is compared some steps after the commit
            outcomes.setdefault(record["push_version"], {}).update(record)
    if not outcomes:
        return ""
    rows = [{**outcome, "fate": _fate(outcome)} for outcome in outcomes.values()]
    columns = {
        "version": ("push_version", "{}"),
        "outcome": ("fate", "{}"),
        "seconds": ("push_s", "{:.2f} s"),
        "τ before": ("push_acceptance_before", "{:.2f}"),
        "τ after": ("push_acceptance_after", "{:.2f}"),
    }
    fates = number_table(rows, columns, words=2)
    waits = [record["push_wait_s"] for record in records if "push_wait_s" in record]
    waited = f"<p>Training waited {max(waits):.3f} s for a push at most.</p>" if waits else ""
    return f"<h2>Pushes to running servers</h2>{fates}{waited}"


def judged_drafts(judged: Sequence[Record]) -> str:
    """Return a table of the drafts that were judged on live requests.

    It shows which draft was served after each verdict.
    """
    if not judged:
        return ""
    columns = {
        "step": ("step", "{:,}"),
        "from request": ("oldest_request", "{:,}"),
        "to request": ("requests", "{:,}"),
        "judged by": ("held_out", "{:,}"),
        "τ": ("acceptance_length", "{:.2f}"),
        "τ, served before": ("acceptance_length_served", "{:.2f}"),
        "τ, start": ("acceptance_length_start", "{:.2f}"),
        "saved": ("saved", "{:.1%}"),
        "by chance": ("chance", "{:.1%}"),
        "served before: step": ("parent", "{:,}"),
        "served after: step": ("served", "{:,}"),
    }
    keys = {
        "trained": "acceptance_length",
        "served before": "acceptance_length_served",
        "start": "acceptance_length_start",
    }
    lengths = {label: [(one["requests"], one[key]) for one in judged] for label, key in keys.items()}
    plot = curves("simulated τ on the newest requests", "requests", lengths)
    shown = f"{svg([plot])}{number_table(judged, columns)}{_by_label(judged)}"
    return f"<h2>Drafts judged on live requests</h2>{shown}"


def _by_label(judged: Sequence[Record]) -> str:
    """Return a plot of the acceptance length, by the requests' label, of the draft that each verdict let serve.

    A table of the last verdict follows.
    """
    counts = Counter[str]()
    for verdict in judged:
        counts.update({label: one["held_out"] for label, one in verdict.get("labels", {}).items()})
    if not counts:
        return ""

    lengths = {
        label: [
            (one["requests"], one["labels"][label][length_of_served(one)])
            for one in judged
            if label in one.get("labels", {})
        ]
        for label, _ in counts.most_common(_PLOTTED_LABELS)
    }
    last = next(verdict["labels"] for verdict in reversed(judged) if verdict.get("labels"))
    columns = {
        "label, in the last verdict": ("label", "{}"),
        "judged by": ("held_out", "{:,}"),
        "τ": ("acceptance_length", "{:.2f}"),
        "τ, served before": ("acceptance_length_served", "{:.2f}"),
        "τ, start": ("acceptance_length_start", "{:.2f}"),
    }
    rows = [{"label": label, **one} for label, one in last.items()]
    plot = curves("simulated τ of the served draft by label", "requests", lengths)
    return f"{svg([plot])}{number_table(rows, columns, words=1)}"


def _fate(outcome: Record) -> str:
    if outcome.get("push_reverted"):
        return "reverted"
    return "committed" if outcome.get("push_committed") else "not committed"
