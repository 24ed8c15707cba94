"""Strategy: how the trainer is parallel. It knows no drafting algorithm, only a module and its hints.

Contract (``spec_core.testing.StrategySuite`` quotes the numbers):

S1  ``step`` runs each micro-batch forward and backward once, *sums* gradients over data-parallel ranks (the
    module's losses are shares of a global loss), clips by the global norm, applies the optimizer.
S2  Parameters are kept and updated in float32 whatever the compute dtype; weights are gathered as float32.
S3  The returned StepOutput is summed over micro-batches and data-parallel ranks: equal on every rank.
S4  The number of ranks, and how a batch is cut among them, changes results only by rounding.
S5  ``state_dict`` → ``load_state_dict`` into a fresh strategy continues exactly: the next step gives the same
    bits. It holds model (buffers too) and optimizer, all tensors, sharded, ready for torch.distributed.checkpoint.
S6  No collective without this strategy's own group.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core.config import Config
from spec_core.records import Availability
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from spec_core.ops import VocabularyOps
    from spec_core.records import DraftBatch, ShardHints, StepOutput
    from spec_core.target import TargetSpec, TargetTensors


class OptimizerConfig(Config):
    """AdamW over float32 masters. The learning rate comes with each step."""

    dtype: str = "float32"
    """Compute dtype of the draft: float32 or bfloat16."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest global gradient norm."""


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """What one optimizer step yields: summed outputs and the global gradient norm before clipping."""

    output: StepOutput
    grad_norm: Tensor


class Strategy(Resource):
    """See the module's contract. The caller has initialised torch's default group among the trainer's ranks."""

    name: ClassVar[str]
    api_version: ClassVar[int]
    Config: ClassVar[type[OptimizerConfig]] = OptimizerConfig

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self.config = config
        self.device = device

    @classmethod
    def probe(cls) -> Availability:
        return Availability(ok=True)

    @property
    @abstractmethod
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) of this process on the data-parallel axis."""

    @abstractmethod
    def attach(self, module: nn.Module, hints: ShardHints) -> None:
        """Takes over the module (same initial weights on every rank) and builds its optimizer."""

    @abstractmethod
    def vocabulary_ops(self, target: TargetSpec, tensors: TargetTensors) -> VocabularyOps:
        """The frozen half of the step, on this strategy's device and in its compute dtype."""

    @abstractmethod
    def step(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps, lr: float
    ) -> TrainStep:
        """S1–S3. Every rank passes the same number of micro-batches."""

    @abstractmethod
    def evaluate(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps
    ) -> StepOutput:
        """Forward only, summed like a step's output."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """S5."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """S5."""

    def full_weights(self) -> dict[str, Tensor]:
        """Model state as full CPU tensors under the module's names, on every rank (S2)."""
        from torch.distributed.tensor import DTensor

        model: dict[str, Tensor] = self.state_dict()["model"]
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
            for name, value in model.items()
        }

    def close(self) -> None:
        """Releases what the strategy holds; idempotent."""
