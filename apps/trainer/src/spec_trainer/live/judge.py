"""Compare drafts by the verifications that each needs for the answers of the same held-out requests."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from spec_core.wording import counted
from spec_trainer.live.labels import lengths_by_label
from spec_trainer.workers.run_driver import RankTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spec_trainer.data.dataset import Dataset
    from spec_trainer.live.reservoir import Reservoir
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.workers.run_driver import RunDriver

log = logging.getLogger(__name__)

_MEASURE = "spec_trainer.live.rank_tasks:measure_drafts"
_SURE = 3.0
"""Standard errors of a significant difference: chance exceeds it on one side once in 740 times."""
_LEAST_HELD_OUT = 8
"""Smallest number of held-out requests by which a draft is judged."""
_MOST_CYCLES = 16
"""Largest number of cycles from one verdict to the next, if drafts do not improve."""


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


class VerdictInterval:
    """The number of cycles from one verdict to the next. It doubles as long as no better draft is found."""

    def __init__(self) -> None:
        """Begin with a verdict after each cycle."""
        self._cycles = 1
        self._cycles_left = 1

    def ends_after_cycle(self) -> bool:
        """Count a cycle, and return whether it is time for a verdict."""
        self._cycles_left -= 1
        return self._cycles_left <= 0

    def restart(self, *, has_improved: bool) -> None:
        """Begin the next interval after a verdict. ``has_improved``: whether servers took another draft."""
        self._cycles = 1 if has_improved else min(2 * self._cycles, _MOST_CYCLES)
        self._cycles_left = self._cycles


@dataclass(frozen=True, kw_only=True)
class DraftVerdict:
    """A comparison of the trained, the served and the start draft on held-out requests."""

    trained: DraftRounds
    served: DraftRounds
    start: DraftRounds
    labels: Mapping[str, Mapping[str, Any]]
    """The figures of ``lengths`` by the requests' label, and the number of requests."""

    @property
    def gain(self) -> Gain:
        """The share of verifications that the trained draft saves compared with the served draft."""
        return Gain.of(self.trained, self.served)

    @property
    def lengths(self) -> dict[str, float]:
        """Acceptance length of each draft, by the name of its field in versions.jsonl."""
        rounds = _named(self.trained, self.served, self.start)
        return {name: one.acceptance_length for name, one in rounds.items()}

    def better_draft(self, trained_step: int) -> int | None:
        """Return the step of the draft that servers should take, or None if the served draft stays.

        The start draft returns if it is significantly better than the served draft.
        """
        if self.gain.is_sure and not Gain.of(self.start, self.trained).is_sure:
            return trained_step
        return 0 if Gain.of(self.start, self.served).is_sure else None


def has_enough_held_out(reservoir: Reservoir) -> bool:
    """Return whether there are enough held-out requests to judge a draft by; log it if not."""
    num = len(reservoir.held_out_labels())
    if num < _LEAST_HELD_OUT:
        log.info("too few held-out requests to judge by: %d of %d", num, _LEAST_HELD_OUT)
    return num >= _LEAST_HELD_OUT


def judge_drafts(
    spec: RunSpec, driver: RunDriver, reservoir: Reservoir, drafts: Mapping[int, Path], steps: tuple[int, int]
) -> DraftVerdict | None:
    """Simulate drafts on the held-out requests, and return the verdict.

    It is None if too few requests have finite features.

    ``drafts``: step -> folder of the trained, the served and the start draft. ``steps``: steps of the trained and
    of the served draft; the start draft's is 0. Requests without finite features leave the reservoir.
    """
    held_out, labels = reservoir.held_out(), reservoir.held_out_labels()
    not_finite: set[int] = set()
    worth = simulate(spec, driver, held_out, drafts, not_finite)
    reservoir.leave_out(held_out, not_finite)
    trained, served, start = (worth[step] for step in (*steps, 0))
    if len(trained.tokens) < _LEAST_HELD_OUT:
        log.info("too few held-out requests with finite features to judge by: %d", len(trained.tokens))
        return None
    judged = [label for number, label in enumerate(labels) if number not in not_finite]
    by_label = lengths_by_label(_named(trained, served, start), judged)
    return DraftVerdict(trained=trained, served=served, start=start, labels=by_label)


def _named(trained: DraftRounds, served: DraftRounds, start: DraftRounds) -> dict[str, DraftRounds]:
    return {
        "acceptance_length": trained,
        "acceptance_length_served": served,
        "acceptance_length_start": start,
    }


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
