"""Compare drafts by the number of verifications each would need for the answers of the same held-out requests."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from spec_core.wording import counted
from spec_trainer.draft_trainer import BatchShare
from spec_trainer.follow.finite_features import with_finite_features
from spec_trainer.run.batch_schedule import BatchSchedule
from spec_trainer.training.wiring import build_trainer, default_group

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    import torch

    from spec_trainer.data.dataset import Dataset
    from spec_trainer.decode.inline_driver import InlineDriver
    from spec_trainer.draft_trainer import DraftTrainer
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.training.wiring import RankLinks

_SURE = 3.0
"""Standard errors of a significant difference: chance exceeds it on one side once in 740 times."""


@dataclass(frozen=True)
class DraftRounds:
    """Token count of each answer, and the number of verifications that a draft would need for it."""

    tokens: tuple[int, ...]
    rounds: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per verification."""
        return sum(self.tokens) / sum(self.rounds)

    def of(self, places: Sequence[int]) -> DraftRounds:
        """Return the answers at ``places`` alone."""
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
        """Compare two drafts answer by answer, so that differences between answers cancel out."""
        saved = [old - new for old, new in zip(before.rounds, after.rounds, strict=True)]
        if len(saved) < 2:
            raise ValueError(f"{counted(len(saved), 'answer')}: expected two or more to compare drafts by")
        mean = fmean(before.rounds)
        return cls(fmean(saved) / mean, _SURE * stdev(saved) / math.sqrt(len(saved)) / mean)

    @property
    def is_sure(self) -> bool:
        """Whether the draft ``after`` is significantly better."""
        return self.saved > self.chance


def simulate(
    spec: RunSpec, driver: InlineDriver, held_out: Dataset, drafts: Mapping[int, Path], not_finite: set[int]
) -> dict[int, DraftRounds]:
    """Return step -> the DraftRounds of the exported draft of that step on the samples of ``held_out``.

    ``drafts``: step -> folder of the draft. The samples' features are captured once for all drafts. Samples without
    finite features are left out; their ids are added to ``not_finite``.
    """
    settings = replace(
        spec.schedule.settings, global_batch_tokens=1, shuffle=False, total_steps=len(held_out.train)
    )
    part = replace(spec, schedule=BatchSchedule(held_out, settings))
    lengths: dict[int, list[float]] = {step: [] for step in drafts}

    def judge(part: RunSpec, rank: int, device: torch.device, links: RankLinks) -> None:
        with ExitStack() as stack:
            stack.enter_context(default_group(part, rank, device, links.store))
            trainers = [_trainer(part, folder, device, stack) for folder in drafts.values()]
            links.work(0, lambda: _judge(part, trainers, links, list(lengths.values()), not_finite))

    replace(driver, consume=with_finite_features(judge, not_finite)).train(part)
    judged = [sample for sample in held_out.train if sample.sample_id not in not_finite]
    tokens = tuple(int(sample.loss_mask.sum()) for sample in judged)
    return {
        step: DraftRounds(tokens, tuple(num / tau for num, tau in zip(tokens, found, strict=True)))
        for step, found in lengths.items()
    }


def _judge(
    part: RunSpec,
    trainers: Sequence[DraftTrainer],
    links: RankLinks,
    lengths: Sequence[list[float]],
    not_finite: Collection[int],
) -> None:
    for item in part.schedule.items(0):
        share = BatchShare(
            micro_batches=links.stream.micro_batches(item),
            denominators=part.schedule.denominators((item,), part.draft),
        )
        (sample_id,) = item.sample_ids
        for trainer, found in zip(trainers, lengths, strict=True) if sample_id not in not_finite else ():
            acceptance_length = trainer.evaluate(share).metrics()["acceptance_length"]
            assert isinstance(acceptance_length, float)
            found.append(max(1.0, acceptance_length))
        links.stream.check()


def _trainer(part: RunSpec, folder: Path, device: torch.device, stack: ExitStack) -> DraftTrainer:
    """Return a DraftTrainer with the weights of the exported draft in ``folder``."""
    section = part.config.draft.model_copy(update={"init_from": folder})
    config = part.config.model_copy(update={"draft": section})
    strategy = stack.enter_context(part.strategy_type(config.strategy, config.train, part.optimizer, device))
    return build_trainer(replace(part, config=config, draft=type(part.draft)(section)), 0, strategy)
