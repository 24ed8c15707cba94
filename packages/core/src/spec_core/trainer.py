"""DraftTrainer: whatever trains a draft. The loop, checkpoints and weight sync know only this interface.

Contract:

R1  ``step`` trains on this rank's share of one global batch and returns values that are equal on every rank.
R2  ``named_weights`` yields full tensors under the module's names, buffers included, one at a time, in the same
    order on every rank; every rank must drain it.
R3  ``state_dict`` and ``load_state_dict`` are sharded and complete: see Strategy S5.
R4  ``export`` writes a servable draft folder; rank 0 writes, every rank calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core.records import DraftBatch, StepOutput
    from spec_core.strategy import TrainStep
    from spec_core.target import TargetSpec


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """One rank's part of a global batch."""

    micro_batches: Sequence[DraftBatch]
    denominators: Tensor
    """float64 [S], of the whole global batch."""


class DraftTrainer(ABC):
    """See the module's contract."""

    @abstractmethod
    def step(self, share: BatchShare, lr: float) -> TrainStep:
        """R1."""

    @abstractmethod
    def evaluate(self, share: BatchShare) -> StepOutput:
        """Forward only."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """R2."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """R3."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """R3."""

    @abstractmethod
    def export(self, target: TargetSpec, folder: Path) -> None:
        """R4."""
