"""DraftTrainer: whatever trains a draft. The loop and checkpoints know only this interface.

Contract:

DT1  ``step`` trains on this rank's share of one global batch and returns values that are equal on every rank.
DT2  ``named_weights`` yields full tensors under the module's names, buffers included, one at a time, in the same
     order on every rank; every rank must drain it.
DT3  ``save`` and ``load`` are complete: training continues exactly (Strategy S5).
DT4  ``export`` writes a servable draft folder; rank 0 writes, every rank calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core.records import DraftBatch, StepOutput
    from spec_core.state_folder import StateFolder
    from spec_core.strategy import TrainStep
    from spec_core.target import TargetSpec


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """One rank's part of a global batch."""

    micro_batches: Sequence[DraftBatch]
    denominators: Tensor
    """Loss denominators of the whole global batch, float64 [S]."""


class DraftTrainer(ABC):
    """Trains, saves and exports a draft; the module's docstring holds the contract."""

    @abstractmethod
    def step(self, share: BatchShare, lr: float) -> TrainStep:
        """Train one optimizer step with learning rate ``lr`` (DT1)."""

    @abstractmethod
    def evaluate(self, share: BatchShare) -> StepOutput:
        """Return the output of a forward pass only, summed over ranks."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full tensor with its name (DT2)."""

    @abstractmethod
    def save(self, folder: StateFolder) -> None:
        """Write this rank's part of the state (DT3)."""

    @abstractmethod
    def load(self, folder: StateFolder) -> None:
        """Read the state that ``save`` wrote (DT3)."""

    @abstractmethod
    def export(self, target: TargetSpec, folder: Path) -> None:
        """Write a draft folder that engines load (DT4)."""
