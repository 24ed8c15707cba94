"""This module has the tasks of the trainer rank of ``spec-trainer follow``: train, or measure drafts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_trainer.live.finite_features import with_finite_features
from spec_trainer.run.draft_trainer import BatchShare
from spec_trainer.training.wiring import build_trainer, default_group, train_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from spec_trainer.run.draft_trainer import DraftTrainer
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.training.wiring import RankLinks


def train_on_finite(
    part: RunSpec, rank: int, device: torch.device, links: RankLinks, arguments: Mapping[str, Any]
) -> None:
    """Train on the samples of ``part`` whose features are finite.

    The task's result has the ids of the other samples under ``not_finite``.
    """
    train_rank(part, rank, device, with_finite_features(links))


def measure_drafts(
    part: RunSpec, rank: int, device: torch.device, links: RankLinks, arguments: Mapping[str, Any]
) -> None:
    """Simulate the acceptance length of each draft on each sample of ``part``, one sample in each step.

    ``arguments["drafts"]``: folders of exported drafts. The task's result has, under ``lengths``, a list of
    acceptance lengths for each draft. Samples without finite features are left out; their ids are under
    ``not_finite``.
    """
    links = with_finite_features(links)
    with ExitStack() as stack:
        stack.enter_context(default_group(part, rank, device, links.store))
        trainers = [_trainer(part, Path(folder), device, stack) for folder in arguments["drafts"]]
        links.result["lengths"] = [[] for _ in trainers]
        links.work(part.schedule.steps.start, lambda: _measure(part, trainers, links))


def _measure(part: RunSpec, trainers: Sequence[DraftTrainer], links: RankLinks) -> None:
    for item in part.schedule.items(part.schedule.steps.start):
        share = BatchShare(
            micro_batches=links.stream.micro_batches(item),
            denominators=part.schedule.denominators((item,), part.draft),
        )
        (sample_id,) = item.sample_ids
        is_finite = sample_id not in links.result["not_finite"]
        for trainer, lengths in zip(trainers, links.result["lengths"], strict=True) if is_finite else ():
            metrics = trainer.evaluate(share).metrics()
            # The target generated these answers, at any temperature, so it accepts the guesses that match them.
            acceptance_length = metrics.get("acceptance_length_data", metrics["acceptance_length"])
            assert isinstance(acceptance_length, float)
            lengths.append(max(1.0, acceptance_length))
        links.stream.check()


def _trainer(part: RunSpec, folder: Path, device: torch.device, stack: ExitStack) -> DraftTrainer:
    """Return a DraftTrainer with the weights of the exported draft in ``folder``."""
    section = part.config.draft.model_copy(update={"init_from": folder})
    config = part.config.model_copy(update={"draft": section})
    strategy = stack.enter_context(part.strategy_type(config.strategy, config.train, part.optimizer, device))
    return build_trainer(replace(part, config=config, draft=type(part.draft)(section)), 0, strategy)
