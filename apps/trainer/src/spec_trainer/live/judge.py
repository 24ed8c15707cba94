"""Compare drafts by the verifications that each needs for the answers of the same held-out requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from spec_core.wording import counted
from spec_trainer.workers.run_driver import RankTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spec_trainer.data.dataset import Dataset
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.workers.run_driver import RunDriver

_MEASURE = "spec_trainer.live.rank_tasks:measure_drafts"
_SURE = 3.0
"""Standard errors of a significant difference: chance exceeds it on one side once in 740 times."""


@dataclass(frozen=True)
class DraftRounds:
    """The number of tokens of each answer, and of the verifications that a draft would need for it."""

    tokens: tuple[int, ...]
    rounds: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per verification."""
        return sum(self.tokens) / sum(self.rounds)

    def of(self, places: Sequence[int]) -> DraftRounds:
        """Return a DraftRounds with only the answers at the indices ``places``."""
        return DraftRounds(
            tuple(self.tokens[place] for place in places), tuple(self.rounds[place] for place in places)
        )


@dataclass(frozen=True)
class Gain:
    """Share of verifications that one draft saves compared with another on the same answers."""

    saved: float
    chance: float
    """Three standard errors of ``saved``: chance alone may move it so far to either side."""

    @classmethod
    def of(cls, after: DraftRounds, before: DraftRounds) -> Gain:
        """Return the Gain of the draft with the rounds ``after`` over the draft with the rounds ``before``.

        The drafts are compared answer by answer, so that differences between answers cancel out.
        """
        saved = [old - new for old, new in zip(before.rounds, after.rounds, strict=True)]
        if len(saved) < 2:
            raise ValueError(f"{counted(len(saved), 'answer')}: expected two or more to compare drafts by")
        mean = fmean(before.rounds)
        return cls(fmean(saved) / mean, _SURE * stdev(saved) / math.sqrt(len(saved)) / mean)

    @property
    def is_sure(self) -> bool:
        """Whether the later draft needs significantly fewer verifications than the earlier draft."""
        return self.saved > self.chance


def simulate(
    spec: RunSpec, driver: RunDriver, held_out: Dataset, drafts: Mapping[int, Path], not_finite: set[int]
) -> dict[int, DraftRounds]:
    """Return how many verifications each draft would need for the held-out answers.

    ``drafts``: step -> folder of the draft that was exported at this step. The result maps each step to
    DraftRounds. The features of the samples ``held_out`` are captured once for all drafts. Samples without
    finite features are left out; their ids are added to ``not_finite``.
    """
    task = RankTask(entry=_MEASURE, arguments={"drafts": list(map(str, drafts.values()))})
    part = spec.cycle(held_out, range(len(held_out.train)), global_batch_tokens=1, shuffle=False)
    result = driver.perform(task, part)
    not_finite.update(result["not_finite"])
    judged = [sample for sample in held_out.train if sample.sample_id not in not_finite]
    tokens = tuple(int(sample.loss_mask.sum()) for sample in judged)
    return {
        step: DraftRounds(tokens, tuple(num / tau for num, tau in zip(tokens, found, strict=True)))
        for step, found in zip(drafts, result["lengths"], strict=True)
    }
