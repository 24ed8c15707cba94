"""The optimizer ``adamw`` is torch's AdamW."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from spec_core import MapWhole, Optimizer, OptimizerConfig, TrainedWeight, WeightShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_FLOAT32 = 4
"""Bytes of a float32 value."""

Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(OptimizerConfig):
    """Section ``optimizer`` of a run that names this optimizer."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, on matrices only."""


class AdamWOptimizer(Optimizer):
    """AdamW (arXiv 1711.05101) over float32 weights."""

    name: ClassVar[str] = "adamw"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[OptimizerConfig]] = AdamWConfig

    config: AdamWConfig

    def build(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> torch.optim.AdamW:
        """Return torch's fused AdamW. The state of each weight is exp_avg, exp_avg_sq and step."""
        return build_adamw(weights, self.config)

    def state_bytes(self, weight: WeightShape) -> int:
        """Return the number of bytes of AdamW's state for a weight: two moments and the step count, float32 (G7)."""
        return adamw_bytes(weight)


def adamw_bytes(weight: WeightShape) -> int:
    """Return the number of bytes of AdamW's state for a full weight."""
    return _FLOAT32 * (2 * prod(weight.shape) + 1)


def build_adamw(weights: Sequence[TrainedWeight], config: AdamWConfig) -> torch.optim.AdamW:
    """Return torch's AdamW for these weights, with its state initialized. ``weights`` may be empty."""
    import torch

    groups = [
        {"params": [w.values for w in weights if len(w.shape) >= 2], "weight_decay": config.weight_decay},
        {"params": [w.values for w in weights if len(w.shape) < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)
    for weight in weights:
        # AdamW creates its state in the first step, but a checkpoint is loaded into the state's tensors before.
        optimizer.state[weight.values] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.values.device),
            "exp_avg": torch.zeros_like(weight.values),
            "exp_avg_sq": torch.zeros_like(weight.values),
        }
    return optimizer
