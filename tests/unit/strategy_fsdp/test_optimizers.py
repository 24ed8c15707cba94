"""The strategy attaches what an optimizer plugin builds, and names a plugin that builds no optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_core import StepConfig
from spec_core.errors import PluginError
from spec_core.records import ShardHints
from spec_optimizers.adamw import AdamWOptimizer
from spec_strategy_fsdp.config import FsdpConfig
from spec_strategy_fsdp.strategy import FsdpStrategy


class Forgetful(AdamWOptimizer):
    """AdamW without the return statement."""

    name = "forgetful"

    def build(self, weights, map_whole):
        super().build(weights, map_whole)


def test_a_plugin_that_builds_no_optimizer_is_named():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = Forgetful(AdamWOptimizer.Config(name="forgetful"))
        strategy = FsdpStrategy(FsdpConfig(name="fsdp"), StepConfig(), optimizer, torch.device("cpu"))
        with pytest.raises(
            PluginError, match=r"^optimizer 'forgetful': .*Forgetful\.build returned NoneType"
        ):
            strategy.attach(nn.Linear(3, 2), ShardHints())
    finally:
        dist.destroy_process_group()
