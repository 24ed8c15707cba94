"""The application's one DraftTrainer: a Draft's module under a Strategy."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from spec_core import BatchShare, DraftTrainer
from spec_core.drafting import write_draft
from spec_trainer.disk import follow_umask, new_folder, not_written
from spec_trainer.draft_folder import check_export

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core import Draft, Strategy, TargetSpec, TrainStep, VocabularyOps
    from spec_core.records import StepOutput
    from spec_core.state_folder import StateFolder


class ShardedDraftTrainer(DraftTrainer):
    """A draft's module under a strategy (``spec_core.trainer`` has the contract)."""

    def __init__(
        self, draft: Draft, module: nn.Module, strategy: Strategy, ops: VocabularyOps, rank: int
    ) -> None:
        """Hand ``module`` to the strategy of trainer process ``rank``."""
        self._draft = draft
        self._strategy = strategy
        self._ops = ops
        self._rank = rank
        strategy.attach(module, draft.shard_hints())

    def step(self, share: BatchShare, lr: float) -> TrainStep:
        """Train one optimizer step (DT1)."""
        return self._strategy.step(share.micro_batches, share.denominators, self._ops, lr)

    def evaluate(self, share: BatchShare) -> StepOutput:
        """Return the output of a forward pass only."""
        return self._strategy.evaluate(share.micro_batches, share.denominators, self._ops)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full tensor with its name (DT2)."""
        yield from self._strategy.full_weights().items()

    def save(self, folder: StateFolder) -> None:
        """Let the strategy write this process's part of the state (DT3)."""
        self._strategy.save(folder)

    def load(self, folder: StateFolder) -> None:
        """Let the strategy read the state (DT3)."""
        self._strategy.load(folder)

    def export(self, target: TargetSpec, folder: Path) -> None:
        """Write the draft's folder on process 0 (DT4)."""
        weights = dict(self.named_weights())
        if self._rank == 0:
            export_draft(self._draft, weights, target, folder)


def export_draft(draft: Draft, weights: dict[str, Tensor], target: TargetSpec, folder: Path) -> None:
    """Write a draft folder whole, and one that passes every check of its readers, or not at all.

    Raise RunError where there is no room for it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = new_folder(folder.parent, f".{folder.name}-")
    try:
        write_draft(draft, weights, target, scratch)
        check_export(draft, scratch, target)
        for file in scratch.iterdir():  # whoever serves it may be another user
            follow_umask(file)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    except (OSError, SafetensorError) as error:
        raise not_written(f"draft {folder}", folder.parent, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
