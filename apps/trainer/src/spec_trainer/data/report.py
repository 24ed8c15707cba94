"""Count the used, truncated and dropped rows of the data; note the first row of each of these kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.data.dataset import Sample


@dataclass
class RowCount:
    """Number of rows of one kind, with an example."""

    count: int = 0
    first: str = ""
    """The first such row: ``file:line`` and its problem."""

    def add(self, example: str) -> None:
        """Count one more row; store ``example``, its ``file:line`` and problem, if it is the first."""
        self.first = self.first or example
        self.count += 1

    def __str__(self) -> str:
        """Return the count with the first example."""
        return f"{self.count} (first: {self.first})"


@dataclass
class DataReport:
    """Counts of rows, filled while the data is read; ``str`` formats them as a paragraph."""

    kept: int = 0
    held_out: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: RowCount = field(default_factory=RowCount)
    unsupervised: RowCount = field(default_factory=RowCount)
    """Rows without a supervised token; they are kept, with a loss mask of zeros."""
    dropped: dict[str, RowCount] = field(default_factory=dict)
    """Reason -> rows that were dropped for this reason."""
    notes: dict[str, RowCount] = field(default_factory=dict)
    """Remark -> rows that it is about."""

    def note(self, remark: str, example: str) -> None:
        """Count a row to which a remark applies. ``example``: its ``file:line``, and details."""
        self.notes.setdefault(remark, RowCount()).add(example)

    def drop(self, reason: str, example: str) -> None:
        """Count a row that is left out. ``example``: its ``file:line`` and its problem."""
        self.dropped.setdefault(reason, RowCount()).add(example)

    def count_kept(self, samples: Sequence[Sample], held_out: int) -> None:
        """Count all samples that are used, and their tokens.

        ``held_out``: number of held-out samples, which come last.
        """
        self.kept = len(samples)
        self.held_out = held_out
        self.tokens = sum(len(sample) for sample in samples)
        self.supervised_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)

    def counts(self) -> dict[str, int]:
        """Return the numbers of samples and tokens that are used."""
        names = ("kept", "held_out", "tokens", "supervised_tokens")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Return the report as one paragraph."""
        notes = {**self.notes, "cut to data.max_length": self.truncated}
        notes |= {"without a supervised token": self.unsupervised}
        notes |= {f"dropped: {reason}": rows for reason, rows in self.dropped.items()}
        kept = f"kept samples: {self.kept} ({self.held_out} held out), tokens: {self.tokens}, "
        parts = [f"{kept}{self.supervised_tokens} of them supervised"]
        return "; ".join(parts + [f"{what}: {rows}" for what, rows in notes.items() if rows.count])
