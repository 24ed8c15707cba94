"""Build the torch optimizer of an optimizer plugin, and name the plugin if it builds none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_core import MapWhole, Optimizer, TrainedWeight
from spec_core.errors import PluginError


def build_torch_optimizer(
    plugin: Optimizer, weights: Sequence[TrainedWeight], map_whole: MapWhole
) -> torch.optim.Optimizer:
    """Return what the plugin builds for these weights. Raise PluginError if it is no torch optimizer (G2)."""
    return _checked(plugin, plugin.build(weights, map_whole))


def _checked(plugin: Optimizer, built: object) -> torch.optim.Optimizer:
    if isinstance(built, torch.optim.Optimizer):
        return built
    kind = type(plugin)
    raise PluginError(
        f"optimizer {plugin.name!r}: {kind.__module__}.{kind.__qualname__}.build returned {type(built).__name__}, "
        "expected a torch.optim.Optimizer; mend the plugin, or choose another optimizer.name"
    )
