"""ShardedModule is a draft whose weights several processes divide: FSDP2, or HSDP if there are replicas."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree

from spec_core import VocabularyOps
from spec_core.records import DraftBatch, ShardHints, StepOutput


class ShardedModule:
    """A module under FSDP2. Its float32 shards are the master weights."""

    is_whole: ClassVar[bool] = False
    trained: dict[str, nn.Parameter]
    """Name of each trained weight -> this process's shard of it."""

    def __init__(self, module: nn.Module, hints: ShardHints, replicas: int, dtype: torch.dtype) -> None:
        """Shard ``module``, which is on this process's device, over the processes of each of the replicas."""
        _register_step_output()
        ranks = dist.get_world_size()
        device = next(module.parameters()).device
        shape = (ranks,)
        axes = ("shard",)
        if replicas > 1:
            shape = (replicas, ranks // replicas)
            axes = ("replicate", "shard")
        self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes)
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # A replica of one rank need not reshard after the forward pass: the cast weights serve the backward pass.
        reshard = False if self._mesh.size(-1) == 1 else None
        for block in [*map(module.get_submodule, hints.blocks), module]:
            sharded = fully_shard(block, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshard)
            # A rank's loss is its share of the global loss, so gradients are summed, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        self._module: FSDPModule = module  # pyright: ignore[reportAttributeAccessIssue]
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def begin(self) -> None:
        """Prepare forward passes with the current master weights; FSDP2 gathers them when they are needed."""

    def forward(
        self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps, *, reduces: bool = True
    ) -> StepOutput:
        """Return the output of a micro-batch. ``reduces``: whether its backward pass sums gradients over ranks.

        Gradients stay local until the last micro-batch: one reduce-scatter, and one all-reduce over replicas.
        """
        self._module.set_requires_gradient_sync(reduces)
        output: StepOutput = self._module(batch, denominators, ops)  # pyright: ignore[reportCallIssue]
        return output

    def end_pass(self) -> None:
        """Do nothing, because FSDP2 adds up the gradients of backward passes."""

    def end_evaluation(self) -> None:
        """Free gathered weights, which without a backward pass would stay, and which no optimizer updates."""
        for part in self._module.modules():  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(part, FSDPModule):
                part.reshard()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this process's shard of each float32 weight, and the buffers."""
        return self._module.state_dict()  # pyright: ignore[reportAttributeAccessIssue]

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's shard of a tensor that is divided like the weight ``name``."""
        weight = self.trained[name]
        assert isinstance(weight, DTensor)
        return distribute_tensor(whole, self._mesh, weight.placements, src_data_rank=None)


def _register_step_output() -> None:
    """Register StepOutput as a pytree, because FSDP2 attaches backward hooks to tensors of pytrees only."""
    if StepOutput not in _pytree.SUPPORTED_NODES:
        _pytree.register_dataclass(StepOutput)
