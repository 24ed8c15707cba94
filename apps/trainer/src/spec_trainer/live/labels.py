"""Compute the acceptance of drafts by the label of requests: a client's label, or the request's path."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from spec_kit.live_traffic.live_requests import OTHER_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_trainer.live.judge import DraftRounds

MOST_LABELS = 32
"""Largest number of labels in a run, besides ``other``. A server sends only labels that its operator has listed."""


class LabelCounts:
    """Counts requests by label; a label beyond the first ``MOST_LABELS`` is counted as ``other``."""

    def __init__(self) -> None:
        """Start without requests."""
        self.requests: Counter[str] = Counter()
        """Number of requests by label."""
        self._known = {OTHER_LABEL}

    def add(self, label: str) -> str:
        """Count a request, and return the label that it has in this run."""
        label = self.bounded(label)
        self.requests[label] += 1
        return label

    def bounded(self, label: str) -> str:
        """Return the label under which this run counts requests with ``label``: ``label`` or ``other``."""
        if label not in self._known and len(self._known) > MOST_LABELS:
            return OTHER_LABEL
        self._known.add(label)
        return label


def lengths_by_label(drafts: Mapping[str, DraftRounds], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the number of held-out requests with each label, and each draft's acceptance length on them.

    ``drafts``: name of the figure -> DraftRounds of a draft. ``labels``: the label of each answer.
    """
    found: dict[str, dict[str, Any]] = {}
    for label in sorted(set(labels)):
        places = [place for place, one in enumerate(labels) if one == label]
        lengths = {name: rounds.of(places).acceptance_length for name, rounds in drafts.items()}
        found[label] = {"held_out": len(places), **lengths}
    return found
