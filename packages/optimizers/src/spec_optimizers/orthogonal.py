"""Compute Muon's steps: the orthogonalized momentum of each matrix.

``torch.optim.Muon`` is not used, because it takes full matrices only. It also computes in bfloat16, which takes 20
times as long as float32 on many CPUs.
"""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core import MapWhole, TrainedWeight
    from spec_optimizers.muon import MuonConfig

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the Newton-Schulz iteration (Keller Jordan's, as in torch.optim.Muon)."""
_EPS = 1e-7


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices, which may be sharded over ranks, and AdamW for other weights."""

    def __init__(
        self,
        matrices: Sequence[TrainedWeight],
        others: torch.optim.AdamW,
        config: MuonConfig,
        map_whole: MapWhole,
    ) -> None:
        """Create the Muon state of ``matrices``, and join it with ``others``, the AdamW of all other weights.

        ``map_whole`` applies a function to the full matrices, although each rank may hold only a shard of
        them.
        """
        group = {
            "params": [matrix.values for matrix in matrices],
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "matrix_rate": config.matrix_rate,
        }
        super().__init__([group], {"lr": 0.0})
        self._names = [matrix.name for matrix in matrices]
        self._map_whole = map_whole
        self._whole_step = partial(matrix_step, scale=config.matrix_scale)
        self._others = others
        for matrix in matrices:
            self.state[matrix.values] = {"momentum": torch.zeros_like(matrix.values)}
        self.param_groups += others.param_groups
        self.state.update(others.state)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every weight. Collective: every rank calls it."""
        group, *others = self.param_groups
        matrices: list[Tensor] = group["params"]
        directions = [self._direction(matrix, group["momentum"]) for matrix in matrices]
        steps = self._map_whole(self._whole_step, dict(zip(self._names, directions, strict=True)))
        rate = group["lr"] * group["matrix_rate"]
        for name, matrix in zip(self._names, matrices, strict=True):
            matrix.mul_(1 - rate * group["weight_decay"]).add_(steps[name], alpha=-rate)
        # Loading a state creates new parameter groups and a new state dictionary.
        self._others.param_groups = others
        self._others.state = self.state
        self._others.step()

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        """Update the momentum and return Nesterov's direction; a missing gradient counts as 0."""
        mean: Tensor = self.state[matrix]["momentum"]
        gradient = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum)


def matrix_step(direction: Tensor, scale: str) -> Tensor:
    """Return the step of a full matrix at a learning rate of 1. ``scale``: the option ``matrix_scale``."""
    rows, columns = direction.shape
    length = 0.2 * sqrt(max(rows, columns)) if scale == "match_rms_adamw" else sqrt(max(1, rows / columns))
    return orthogonalised(direction).mul_(length)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return approximately the nearest matrix whose singular values are all 1 (here between 0.7 and 1.2).

    It is computed in bfloat16, or on a CPU in the dtype of ``matrix``.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x if x.is_cpu else x.bfloat16()
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).to(matrix.dtype)
