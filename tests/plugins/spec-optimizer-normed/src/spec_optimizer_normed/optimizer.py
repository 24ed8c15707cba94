"""Optimizer ``normed``: the plugin. It imports without torch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from spec_core import MapWhole, Optimizer, OptimizerConfig, TrainedWeight, WeightShape
from spec_core.records import Availability

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class NormedConfig(OptimizerConfig):
    """Section ``optimizer`` of a run that names this optimizer."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the last step's direction that the next one keeps."""


class NormedOptimizer(Optimizer):
    name: ClassVar[str] = "normed"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[OptimizerConfig]] = NormedConfig

    config: NormedConfig

    @classmethod
    def probe(cls) -> Availability:
        return Availability(ok=True)

    def build(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> torch.optim.Optimizer:
        from spec_optimizer_normed.normed import Normed

        return Normed(weights, map_whole, self.config.momentum)

    def state_bytes(self, weight: WeightShape) -> int:
        return 4 * prod(weight.shape)
