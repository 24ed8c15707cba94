"""The optimizer ``muon`` applies Muon to hidden matrices and AdamW to all other weights.

Hidden matrices are all matrices except embeddings and heads.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat  # noqa: TC002 (pydantic evaluates annotations)

from spec_core import MapWhole, Optimizer, OptimizerConfig, TrainedWeight, WeightShape
from spec_optimizers.adamw import AdamWConfig, Decay, adamw_bytes, build_adamw

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class MuonConfig(AdamWConfig):
    """Section ``optimizer`` of a run that names this optimizer; ``betas`` and ``eps`` are for AdamW."""

    matrix_rate: PositiveFloat = 1.0
    """Learning rate of the hidden matrices, as a multiple of ``train.lr``."""
    momentum: Decay = 0.95
    """Nesterov momentum of the hidden matrices."""
    matrix_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on a matrix's step, by its shape (torch's ``adjust_lr_fn``). ``match_rms_adamw``: 0.2 · √(longer
    side); steps are then as long as AdamW's, so AdamW's learning rates suit. ``original``: √(rows / columns), at
    least 1."""


class MuonOptimizer(Optimizer):
    """Muon (arXiv 2502.16982) for hidden matrices, and AdamW for a head, an embedding and vectors."""

    name: ClassVar[str] = "muon"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[OptimizerConfig]] = MuonConfig

    config: MuonConfig

    def build(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> torch.optim.Optimizer:
        """Return one torch optimizer: Muon for matrices (state: momentum) and AdamW for all other weights."""
        from spec_optimizers.orthogonal import MuonAndAdamW

        matrices = [weight for weight in weights if weight.is_hidden_matrix]
        others = [weight for weight in weights if not weight.is_hidden_matrix]
        return MuonAndAdamW(matrices, build_adamw(others, self.config), self.config, map_whole)

    def state_bytes(self, weight: WeightShape) -> int:
        """Return the number of bytes of a matrix's float32 momentum, or of AdamW's state for another weight (G7)."""
        return 4 * prod(weight.shape) if weight.is_hidden_matrix else adamw_bytes(weight)
