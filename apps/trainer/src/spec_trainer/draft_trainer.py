"""DraftTrainer: a draft's module under a strategy, all that the loop and checkpoints know of both."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from spec_core.errors import ArtifactError, RunError
from spec_kit.drafting import write_draft
from spec_trainer.data.chat_config import write_chat_record
from spec_trainer.disk import follow_umask, new_folder, not_written, remove
from spec_trainer.draft_folder import check_export

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core import Draft, StateFolder, Strategy, TargetSpec, TrainStep, VocabularyOps
    from spec_core.records import DraftBatch, StepOutput
    from spec_trainer.data.chat_config import ChatConfig


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """One rank's part of a global batch."""

    micro_batches: Sequence[DraftBatch]
    denominators: Tensor
    """Loss denominators of the whole global batch, float64 [S]."""


class DraftTrainer:
    """Trains, saves and exports a draft. Every rank makes each call; its results are equal on all of them."""

    def __init__(self, draft: Draft, strategy: Strategy, ops: VocabularyOps, rank: int) -> None:
        """Train with the strategy of trainer process ``rank``, which has the draft's module already."""
        self._draft = draft
        self._strategy = strategy
        self._ops = ops
        self._rank = rank

    def step(self, share: BatchShare, lr: float) -> TrainStep:
        """Train one optimizer step with learning rate ``lr``."""
        return self._strategy.step(share.micro_batches, share.denominators, self._ops, lr)

    def evaluate(self, share: BatchShare) -> StepOutput:
        """Return the output of a forward pass only, summed over ranks."""
        return self._strategy.evaluate(share.micro_batches, share.denominators, self._ops)

    def save(self, folder: StateFolder) -> None:
        """Let the strategy write this process's part of the state."""
        self._strategy.save(folder)

    def load(self, folder: StateFolder) -> None:
        """Let the strategy read the state."""
        self._strategy.load(folder)

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's full tensors, each lent until the next; every rank takes all of them."""
        return self._strategy.gather_weights()

    def exported(self, weights: Mapping[str, Tensor], target: TargetSpec) -> dict[str, Tensor]:
        """Return what an export of the module's full tensors holds, in memory of its own; any thread may call it."""
        lent = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
        return {
            name: tensor.clone() if tensor.untyped_storage().data_ptr() in lent else tensor
            for name, tensor in self._draft.exported_tensors(weights, target)
        }

    def export(self, target: TargetSpec, folder: Path, chat: ChatConfig) -> None:
        """Write a draft folder that engines load, with a record of ``chat``; rank 0 writes."""
        weights = self._strategy.full_weights()
        if self._rank != 0:
            return
        try:
            export_draft(self._draft, weights, target, folder, chat)
        except ArtifactError as error:
            raise RunError(f"{error}, or lower train.lr or train.clip and start anew") from error


def export_draft(
    draft: Draft,
    weights: dict[str, Tensor],
    target: TargetSpec,
    folder: Path,
    chat: ChatConfig | None = None,
) -> None:
    """Write a draft folder whole, and one that passes every check of its readers, or not at all.

    ``chat``: how the conversations were rendered that it was trained on; recorded beside it. Raise RunError
    where there is no room for it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = new_folder(folder.parent, f".{folder.name}-")
    try:
        write_draft(draft, weights, target, scratch)
        if chat is not None:
            write_chat_record(scratch, chat)
        check_export(draft, scratch, target)
        for file in scratch.iterdir():  # whoever serves it may be another user
            follow_umask(file)
        if os.path.lexists(folder):
            remove(folder)
        scratch.rename(folder)
    except (OSError, SafetensorError) as error:
        raise not_written(f"draft {folder}", folder.parent, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
