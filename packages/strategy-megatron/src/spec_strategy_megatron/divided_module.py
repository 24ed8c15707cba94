"""Divide a draft's module for one rank of a tensor-parallel group, according to the draft's hints.

The module's own code then runs on this rank's shards of the weights. Hooks around its submodules add the
communication. If an undivided tensor enters divided layers, its gradient is summed over ranks. If each rank's
divided layers compute a summand of the output, the summands are summed. Layers that a draft never calls,
because a kernel takes their weights, are also divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from spec_kit.sharding import TensorParallelHints
from spec_strategy_megatron.divided_tokens import (
    enter_from_parts,
    gather_output,
    leave_in_parts,
    split_input,
)


@dataclass(frozen=True)
class Division:
    """How a parameter is divided over a tensor-parallel group."""

    dimension: int
    """The dimension along which the parameter is divided."""
    copies: int = 1
    """Number of neighbouring ranks that hold the same shard."""


def divide(
    module: nn.Module, hints: TensorParallelHints, group: dist.ProcessGroup, sequence_parallel: bool
) -> dict[str, Division]:
    """Divide the weights and add the hooks; return the Division of each divided parameter, by name."""
    size = dist.get_world_size(group)
    columns = {
        name: Division(0, max(1, size // pieces) if name in hints.replicated else 1)
        for name, pieces in hints.columns.items()
    }
    divisions = {f"{name}.weight": division for name, division in columns.items()}
    divisions |= {f"{name}.weight": Division(1) for name in hints.rows}
    divisions |= {
        f"{name}.bias": division
        for name, division in columns.items()
        if module.get_submodule(name).bias is not None
    }
    for name, division in divisions.items():
        _cut(module, name, division, group)
    for name in hints.whole_inputs:
        module.get_submodule(name).register_forward_pre_hook(partial(_cut_input, group))
    parts = set(hints.each_token) if sequence_parallel else set[str]()
    for name in hints.enters:
        enter = enter_from_parts if name in parts else _enter
        module.get_submodule(name).register_forward_hook(partial(enter, group))
    for name in hints.leaves:
        leave = leave_in_parts if sequence_parallel else _leave
        module.get_submodule(name).register_forward_hook(partial(leave, group))
    for name in hints.all_tokens_in if sequence_parallel else ():
        module.get_submodule(name).register_forward_pre_hook(partial(split_input, group))
    for name in hints.all_tokens_out if sequence_parallel else ():
        module.get_submodule(name).register_forward_hook(partial(gather_output, group))
    return divisions


def _cut(module: nn.Module, name: str, division: Division, group: dist.ProcessGroup) -> None:
    """Replace a parameter by this rank's shard of it."""
    layer_name, _, attribute = name.rpartition(".")
    layer = module.get_submodule(layer_name)
    whole: Tensor = getattr(layer, attribute)
    index, copy = divmod(dist.get_rank(group), division.copies)
    part = whole.detach().chunk(dist.get_world_size(group) // division.copies, division.dimension)[index]
    parameter = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
    # The norm of gradients counts only the first copy of a shard.
    set_tensor_model_parallel_attributes(parameter, is_parallel=copy == 0, dim=division.dimension, stride=1)
    setattr(layer, attribute, parameter)
    if attribute == "weight":
        layer.out_features, layer.in_features = part.shape


def _cut_input(group: dist.ProcessGroup, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    entered = _entered(inputs[0], group)
    return entered.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)]


# Megatron sums in place, and treats every tensor as contiguous, so each sum gets a tensor of its own.
_own = partial(torch.clone, memory_format=torch.contiguous_format)


def _enter(group: dist.ProcessGroup, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return _entered(output, group)


def _entered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor ``whole``; in the backward pass, its gradients are summed over ranks."""
    entered = copy_to_tensor_model_parallel_region(whole, group)
    if entered.requires_grad:
        entered.register_hook(_own)
    return entered


def _leave(group: dist.ProcessGroup, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(_own(output), group)
