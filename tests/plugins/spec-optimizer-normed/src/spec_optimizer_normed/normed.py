"""The optimizer itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core import MapWhole, TrainedWeight


class Normed(torch.optim.Optimizer):
    def __init__(self, weights: Sequence[TrainedWeight], map_whole: MapWhole, momentum: float) -> None:
        super().__init__([weight.values for weight in weights], {"lr": 0.0})
        self._weights = weights
        self._map_whole = map_whole
        self._momentum = momentum
        for weight in weights:
            self.state[weight.values] = {"mean": torch.zeros_like(weight.values)}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        directions = {weight.name: self._direction(weight.values) for weight in self._weights}
        matrices = [weight.name for weight in self._weights if weight.is_hidden_matrix]
        directions |= self._map_whole(of_one_length, {name: directions[name] for name in matrices})
        for weight in self._weights:
            weight.values.add_(directions[weight.name], alpha=-self.param_groups[0]["lr"])

    def _direction(self, values: Tensor) -> Tensor:
        mean = self.state[values]["mean"]
        gradient = torch.zeros_like(values) if values.grad is None else values.grad
        return mean.lerp_(gradient, 1 - self._momentum)


def of_one_length(direction: Tensor) -> Tensor:
    return direction * direction.numel() ** 0.5 / (direction.norm() + 1e-7)
