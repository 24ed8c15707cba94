"""Sum tensors over ranks so that every rank gets the same bits."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 has renamed the function, and warns about the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009


def ordered_sum(values: Tensor, group: Any) -> Tensor:
    """Return the sum of ``values`` over the ranks of ``group``, which each rank computes in rank order.

    Not every vendor's all-reduce supports float64.
    """
    everyones = values.new_empty(dist.get_world_size(group) * values.numel())
    _all_gather(everyones, values, group=group)
    return everyones.view(-1, values.numel()).sum(0)
