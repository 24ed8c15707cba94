"""ToyOptimizer is an optimizer for tests that uses all that a strategy provides; PlainDescent is SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from spec_core import MapWhole, Optimizer, TrainedWeight

_MOMENTUM = 0.8


class ToyOptimizer(Optimizer):
    """Gradient descent with momentum; the step of a matrix is scaled to a fixed length.

    It uses state, a step count and ``map_whole``.
    """

    name: ClassVar[str] = "toy"
    api_version: ClassVar[int] = 1

    def build(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> torch.optim.Optimizer:
        """Return the torch optimizer of these weights."""
        return _Toy(weights, map_whole)


class _Toy(torch.optim.Optimizer):
    def __init__(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> None:
        super().__init__([{"params": [weight.values for weight in weights]}], {"lr": 0.0})
        self._matrices = [weight.name for weight in weights if weight.is_hidden_matrix]
        self._weights = weights
        self._map_whole = map_whole
        for weight in weights:
            self.state[weight.values] = {
                "mean": torch.zeros_like(weight.values),
                "step": torch.zeros((), device=weight.values.device),
            }

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        values: dict[str, Tensor] = dict(
            zip([weight.name for weight in self._weights], group["params"], strict=True)
        )
        directions = {name: self._direction(value) for name, value in values.items()}
        directions |= self._map_whole(_unit, {name: directions[name] for name in self._matrices})
        for name, value in values.items():
            value.add_(directions[name], alpha=-group["lr"])

    def _direction(self, value: Tensor) -> Tensor:
        """Return the running mean of the gradients, with Adam's bias correction."""
        state = self.state[value]
        state["step"] += 1
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        state["mean"].lerp_(gradient, 1 - _MOMENTUM)
        return state["mean"] / (1 - _MOMENTUM ** float(state["step"]))


def _unit(matrix: Tensor) -> Tensor:
    return matrix / (matrix.norm() + 1e-3)


class PlainDescent(Optimizer):
    """Plain gradient descent: each step is the learning rate times the gradient."""

    name: ClassVar[str] = "descent"
    api_version: ClassVar[int] = 1

    def build(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> torch.optim.Optimizer:
        """Return the torch optimizer of these weights."""
        return torch.optim.SGD([weight.values for weight in weights])
