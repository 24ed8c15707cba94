"""Implement sequence parallelism: between divided layers, each rank holds a share of the tokens.

Tokens are the second-to-last dimension, channels the last. Megatron's functions divide along the first dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from spec_core.records import DraftBatch


def pad_tokens(batch: DraftBatch, multiple: int) -> DraftBatch:
    """Return the batch padded at its end to a positive multiple of ``multiple`` tokens."""
    num_tokens = len(batch.input_ids_T)
    guess_depth_T = batch.guess_depth_T
    missing = max(multiple, num_tokens + -num_tokens % multiple) - num_tokens
    batch = replace(batch, rows_multiple=multiple)
    if not missing:
        return batch
    return replace(
        batch,
        input_ids_T=F.pad(batch.input_ids_T, (0, missing)),
        hidden_TNH=F.pad(batch.hidden_TNH, (0, 0, 0, 0, 0, missing)),
        loss_mask_T=F.pad(batch.loss_mask_T, (0, missing)),
        guess_depth_T=None if guess_depth_T is None else F.pad(guess_depth_T, (0, missing)),
    )


def split_input(group: dist.ProcessGroup, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep only this rank's tokens of the first input; in the backward pass, gradients are gathered."""
    return _mapped(scatter_to_sequence_parallel_region, inputs[0], group), *inputs[1:]


def leave_in_parts(group: dist.ProcessGroup, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Sum the output over ranks, and keep this rank's tokens; the backward pass gathers gradients."""
    return _mapped(reduce_scatter_to_sequence_parallel_region, output, group)


def enter_from_parts(group: dist.ProcessGroup, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Gather all tokens; in the backward pass, their gradients are summed over ranks."""
    return _mapped(gather_from_sequence_parallel_region, output, group)


def gather_output(group: dist.ProcessGroup, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Gather all tokens. In the backward pass, every rank already has the tokens' full gradient."""
    return _mapped(gather_from_sequence_parallel_region, output, group, tensor_parallel_output_grad=False)


def _mapped(
    mapping: Callable[..., Tensor], tokens: Tensor, group: dist.ProcessGroup, **options: bool
) -> Tensor:
    """Apply one of Megatron's functions along the token dimension."""
    if not tokens.numel():
        # There is nothing to exchange, but the shape must be right, and every input needs a gradient (of zero).
        parts = dist.get_world_size(group)
        if mapping is gather_from_sequence_parallel_region:
            return torch.cat([tokens] * parts, dim=-2)
        return tokens.narrow(-2, 0, tokens.shape[-2] // parts)
    return mapping(tokens.movedim(-2, 0), group=group, **options).movedim(0, -2).contiguous()
