"""DraftTrainer wraps a draft and its strategy for the training loop and the checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from spec_core.errors import ArtifactError, RunError
from spec_kit.drafting import write_draft
from spec_trainer.base.disk import follow_umask, not_written, remove, scratch_beside
from spec_trainer.configuration.chat import write_chat_record
from spec_trainer.run.draft_folder import check_export

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core import Draft, StateFolder, Strategy, TargetSpec, TrainStep, VocabularyOps
    from spec_core.records import DraftBatch, StepOutput
    from spec_trainer.configuration.chat import ChatConfig


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """The micro-batches of a global batch on which one rank trains."""

    micro_batches: Sequence[DraftBatch]
    denominators: Tensor
    """Denominators of the loss, float64 [S], summed over the whole global batch. S: number of the draft's
    denominators."""


class DraftTrainer:
    """Trains, saves and exports a draft. Every rank must make each call, and all ranks get equal results."""

    def __init__(self, draft: Draft, strategy: Strategy, ops: VocabularyOps, rank: int) -> None:
        """Prepare to train ``draft`` as trainer process ``rank``.

        ``strategy`` must already have been given the draft's module.
        """
        self._draft = draft
        self._strategy = strategy
        self._ops = ops
        self._rank = rank

    def step(self, share: BatchShare, lr: float) -> TrainStep:
        """Train one optimizer step with learning rate ``lr``."""
        return self._strategy.step(share.micro_batches, share.denominators, self._ops, lr)

    def evaluate(self, share: BatchShare) -> StepOutput:
        """Run forward passes only, and return loss and metrics, summed over micro-batches and ranks."""
        return self._strategy.evaluate(share.micro_batches, share.denominators, self._ops)

    def save(self, folder: StateFolder) -> None:
        """Let the strategy write this process's shard of the training state into ``folder``."""
        self._strategy.save(folder)

    def load(self, folder: StateFolder) -> None:
        """Let the strategy read the training state from ``folder``."""
        self._strategy.load(folder)

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's full tensors by name; every rank must iterate to the end.

        A tensor is valid only until the next one is yielded.
        """
        return self._strategy.gather_weights()

    def exported(self, weights: Mapping[str, Tensor], target: TargetSpec) -> dict[str, Tensor]:
        """Return copies of the tensors that an export of the full ``weights`` would contain. Thread-safe."""
        lent = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
        return {
            name: tensor.clone() if tensor.untyped_storage().data_ptr() in lent else tensor
            for name, tensor in self._draft.exported_tensors(weights, target)
        }

    def export(self, target: TargetSpec, folder: Path, chat: ChatConfig) -> None:
        """Export the draft to ``folder``, with the chat settings ``chat``. Collective; only rank 0 writes."""
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
    named: Path | None = None,
) -> None:
    """Write a draft folder atomically, and only if the draft's plugin and engines accept it.

    ``chat``: settings by which the training conversations were rendered; saved in the folder. Raise RunError
    if the disk is full. ``named``: what the error names in place of ``folder``, a folder that the user never sees.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_beside(folder) as scratch:
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
            named = named or folder
            raise not_written(f"draft {named}", named.parent, error) from error
