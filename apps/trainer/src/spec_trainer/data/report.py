"""What became of the rows: kept, cut, dropped and why, with the place of the first of each kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.data.dataset import Sample


@dataclass
class Tally:
    count: int = 0
    first: str = ""
    """``file:line`` of the first one, and what there is to say about it."""

    def add(self, example: str) -> None:
        self.first = self.first or example
        self.count += 1

    def __str__(self) -> str:
        return f"{self.count} (first: {self.first})"


@dataclass
class DataReport:
    """Filled while the data is read; ``str`` is a paragraph for people."""

    kept: int = 0
    held_out: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: Tally = field(default_factory=Tally)
    unsupervised: Tally = field(default_factory=Tally)
    """Kept, but without a supervised token: trained with a zero mask."""
    dropped: dict[str, Tally] = field(default_factory=dict)
    """By reason."""

    def drop(self, reason: str, example: str) -> None:
        self.dropped.setdefault(reason, Tally()).add(example)

    def count_kept(self, samples: Sequence[Sample], held_out: int) -> None:
        self.kept, self.held_out = len(samples), held_out
        self.tokens = sum(len(sample) for sample in samples)
        self.supervised_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)

    def __str__(self) -> str:
        notes = {"cut to data.max_length": self.truncated, "without a supervised token": self.unsupervised}
        notes |= {f"dropped: {reason}": tally for reason, tally in self.dropped.items()}
        kept = f"kept {self.kept} samples ({self.held_out} held out), {self.tokens} tokens, "
        parts = [f"{kept}{self.supervised_tokens} of them supervised"]
        return "; ".join(parts + [f"{what}: {tally}" for what, tally in notes.items() if tally.count])
