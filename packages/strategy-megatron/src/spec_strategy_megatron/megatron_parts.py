"""Make Megatron's data-parallel module, and its optimizer, which wraps a torch optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from spec_core import StepConfig


@dataclass(frozen=True)
class Master:
    """The float32 elements of one parameter that this rank's optimizer updates: all, some or none."""

    tensor: Tensor
    """The elements, in the tensor that the optimizer holds."""
    first: int = 0
    """Index of the first element within the parameter."""

    @property
    def values(self) -> Tensor:
        """The elements, flat, [n]."""
        return self.tensor.detach().view(-1)

    def of(self, parameter: Tensor) -> Tensor:
        """Return the elements of ``parameter``, or of a tensor of its shape, to which this master corresponds."""
        return parameter.detach().view(-1)[self.first : self.first + len(self.values)]


def data_parallel(
    module: nn.Module, mesh: DeviceMesh, alone: ProcessGroup, distributed_optimizer: bool
) -> DistributedDataParallel:
    """Return the module with float32 gradients that are summed over the mesh's data axis.

    ``alone``: the group that has only this process. With the distributed optimizer, a rank gets only its
    range of the summed gradients.
    """
    groups = ProcessGroupCollection()
    groups.dp = groups.dp_cp = groups.expt_dp = mesh.get_group("data")
    groups.tp = mesh.get_group("tensor")
    groups.pp = alone
    groups.ep = alone
    # Megatron reads only the parallel size; "per token" means that gradients are summed, not averaged.
    config = TransformerConfig(
        num_layers=1,
        hidden_size=mesh["tensor"].size(),
        num_attention_heads=mesh["tensor"].size(),
        tensor_model_parallel_size=mesh["tensor"].size(),
        calculate_per_token_loss=True,
    )
    # Parameters are not gathered during the forward pass. That would need a call of each module, but a draft
    # may read a module's weights without a call.
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=distributed_optimizer,
    )
    return DistributedDataParallel(config, settings, module, pg_collection=groups)


def build_optimizer(
    parallel: DistributedDataParallel,
    settings: StepConfig,
    mesh: DeviceMesh,
    everyone: ProcessGroup,
) -> MegatronOptimizer:
    """Return Megatron's optimizer, which updates float32 masters of the module's parameters.

    Megatron's optimizer computes the norm of the gradients over all ranks. It contains an AdamW, the only class that
    it accepts, and makes the masters. The optimizer that the user has chosen replaces the AdamW afterwards.
    """
    adam = torch.optim.AdamW(parallel.params_with_grad, lr=0.0)
    distributed = parallel.ddp_config.use_distributed_optimizer
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=0.0,
        clip_grad=settings.clip,
        bf16=settings.dtype == "bfloat16",
        use_distributed_optimizer=distributed,
    )
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    if distributed:
        rank = torch.distributed.get_rank(tensor)
        optimizer = DistributedOptimizer(
            adam, config, None, lambda *_: None, [parallel], {0: parallel.buffers}, data, None, rank, 0
        )
    elif config.bf16:
        optimizer = Float16OptimizerWithFloat16Params(adam, config, None, lambda *_: None)
    else:
        optimizer = FP32Optimizer(adam, config, lambda *_: None)
    optimizer.tp_group = tensor
    optimizer.grad_stats_parallel_group = everyone if distributed else tensor
    return optimizer


def masters_of(optimizer: MegatronOptimizer, parameters: Sequence[nn.Parameter]) -> list[Master]:
    """Return the master of each parameter."""
    if not isinstance(optimizer, DistributedOptimizer):
        whole = [getattr(parameter, "main_param", parameter) for parameter in parameters]
        return [Master(master) for master in whole]
    first = {
        parameter: ranges["param"].start
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }
    own: dict[nn.Parameter, Tensor] = {}
    for models, shards in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for group, masters in zip(models, shards, strict=True):
            masters[:] = map(_as_leaf, masters)
            own.update(zip(group, masters, strict=True))
    return [
        Master(own[parameter], first[parameter])
        if parameter in own
        else Master(parameter.detach().new_empty(0, dtype=torch.float32))
        for parameter in parameters
    ]


def _as_leaf(master: Tensor) -> Tensor:
    """Return the master as a leaf tensor, which optimizers require; it may be a view of a parameter."""
    if master.is_leaf:
        return master
    leaf = master.detach()
    copy_tensor_model_parallel_attributes(leaf, master)
    return leaf
