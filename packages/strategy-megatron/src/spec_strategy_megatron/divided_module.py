"""A draft's module, cut for one rank of a tensor-parallel group as its hints say.

The module's own code then runs on parts of its weights. What that takes besides is put around its submodules, as
hooks: where a whole tensor enters divided layers, the parts of its gradient are summed; where a part of a sum leaves
them, it is summed. Layers that a draft never calls, because a kernel takes their weights, are divided all the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import nn

from spec_strategy_megatron.divided_tokens import (
    enter_from_parts,
    gather_output,
    leave_in_parts,
    split_input,
)

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.records import TensorParallelHints


def divide(
    module: nn.Module, hints: TensorParallelHints, group: dist.ProcessGroup, sequence_parallel: bool
) -> dict[str, int]:
    """Cut the weights and hang in the sums; return the dimension that each divided parameter is cut along."""
    dimensions = {f"{name}.weight": 0 for name in hints.columns} | {
        f"{name}.weight": 1 for name in hints.rows
    }
    biases = {f"{name}.bias": 0 for name in hints.columns if module.get_submodule(name).bias is not None}
    for name, dimension in (dimensions | biases).items():
        _cut(module, name, dimension, group)
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
    return dimensions | biases


def _cut(module: nn.Module, name: str, dimension: int, group: dist.ProcessGroup) -> None:
    """Replace a parameter by this rank's part of it."""
    layer_name, _, attribute = name.rpartition(".")
    layer = module.get_submodule(layer_name)
    whole: Tensor = getattr(layer, attribute)
    part = whole.detach().chunk(dist.get_world_size(group), dimension)[dist.get_rank(group)]
    parameter = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dimension, stride=1)
    setattr(layer, attribute, parameter)
    if attribute == "weight":
        layer.out_features, layer.in_features = part.shape


def _cut_input(group: dist.ProcessGroup, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    entered = _entered(inputs[0], group)
    return entered.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)]


# Megatron sums in place, and takes what is not contiguous for what is: each sum gets a tensor of its own.
_own = partial(torch.clone, memory_format=torch.contiguous_format)


def _enter(group: dist.ProcessGroup, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return _entered(output, group)


def _entered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor, as it is; backwards, the gradients that the ranks have for it are summed."""
    entered = copy_to_tensor_model_parallel_region(whole, group)
    if entered.requires_grad:
        entered.register_hook(_own)
    return entered


def _leave(group: dist.ProcessGroup, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(_own(output), group)
