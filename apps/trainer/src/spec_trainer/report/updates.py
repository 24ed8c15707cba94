"""Write the sections of a report about drafts that were pushed to servers or judged on requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from spec_trainer.report.html import number, table
from spec_trainer.report.svg import svg
from spec_trainer.run.records import length_of_served

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

Record = dict[str, Any]

_PLOTTED_LABELS = 8
"""Largest number of labels of one plot: the labels with the most held-out requests."""
_LENGTHS = ("acceptance_length", "acceptance_length_served", "acceptance_length_start")


def pushes(records: Sequence[Record], summary: Mapping[str, Any]) -> str:
    """Return a table with the outcome of each version that was pushed to running servers."""
    outcomes: dict[int, Record] = {}
    for record in (*records, *summary.get("last_pushes", ())):
        if "push_version" in record:  # acceptance is compared some steps after the commit
            outcomes.setdefault(record["push_version"], {}).update(record)
    if not outcomes:
        return ""
    rows = [
        (
            version,
            _fate(outcome),
            number(outcome, "push_s", "{:.2f} s"),
            number(outcome, "push_acceptance_before", "{:.2f}"),
            number(outcome, "push_acceptance_after", "{:.2f}"),
        )
        for version, outcome in outcomes.items()
    ]
    fates = table(("version", "outcome", "seconds", "τ before", "τ after"), rows, words=2)
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
        "oldest_request": ("from request", "{:,}"),
        "requests": ("to request", "{:,}"),
        "held_out": ("judged by", "{:,}"),
        "acceptance_length": ("τ", "{:.2f}"),
        "acceptance_length_served": ("τ, served before", "{:.2f}"),
        "acceptance_length_start": ("τ, start", "{:.2f}"),
        "saved": ("saved", "{:.1%}"),
        "chance": ("by chance", "{:.1%}"),
        "parent": ("served before: step", "{:,}"),
        "served": ("served after: step", "{:,}"),
    }
    heads = [head for head, _ in columns.values()]
    rows = [[number(one, key, form) for key, (_, form) in columns.items()] for one in judged]

    def draw(axes: Sequence[Axes]) -> None:
        for key, label in (("", "trained"), ("_served", "served before"), ("_start", "start")):
            lengths = [one[f"acceptance_length{key}"] for one in judged]
            axes[0].plot([one["requests"] for one in judged], lengths, "o-", ms=4, lw=1.2, label=label)
        axes[0].set(title="simulated τ on the newest requests", xlabel="requests")
        axes[0].legend(frameon=False)

    shown = f"{svg(draw, panels=1)}{table(heads, rows)}{_by_label(judged)}"
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

    def draw(axes: Sequence[Axes]) -> None:
        for label, _ in counts.most_common(_PLOTTED_LABELS):
            points = [
                (one["requests"], one["labels"][label][length_of_served(one)])
                for one in judged
                if label in one.get("labels", {})
            ]
            axes[0].plot(*zip(*points, strict=True), "o-", ms=4, lw=1.2, label=label)
        axes[0].set(title="simulated τ of the served draft by label", xlabel="requests")
        axes[0].legend(frameon=False)

    columns = {"held_out": "{:,}", **dict.fromkeys(_LENGTHS, "{:.2f}")}
    last = next(verdict["labels"] for verdict in reversed(judged) if verdict.get("labels"))
    rows = [
        (label, *(number(one, key, form) for key, form in columns.items())) for label, one in last.items()
    ]
    heads = ("label, in the last verdict", "judged by", "τ", "τ, served before", "τ, start")
    return f"{svg(draw, panels=1)}{table(heads, rows, words=1)}"


def _fate(outcome: Record) -> str:
    if outcome.get("push_reverted"):
        return "reverted"
    return "committed" if outcome.get("push_committed") else "not committed"
