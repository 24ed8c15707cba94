"""ContextRanks is a torch process group of ranks that divide a sample's rows (context parallelism)."""

# torch.distributed declares no __all__, so its functions count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from spec_core import ContextGroup

# torch 2.13 has renamed these functions, and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009


class ContextRanks(ContextGroup):
    """The ranks of a process group; gradients are summed in float32 or wider."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Use ``group``, which no other code may use for collectives."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, parts: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Return, for each tensor of ``parts``, the rows of all ranks (C2)."""
        gathered: tuple[Tensor, ...] = _Gathered.apply(self, tuple(counts), *parts)
        return gathered

    def all_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks. Each rank's rows are padded to the largest number while they are sent."""
        most = max(counts)
        everyones = part.new_empty((self.size * most, *part.shape[1:]))
        if everyones.numel():
            _all_gather(everyones, _padded(part, most), group=self.group)
        if min(counts) == most:
            return everyones
        shares = zip(everyones.split(most), counts, strict=True)
        return torch.cat([share[:count] for share, count in shares])

    def own_sum(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Sum ``rows`` over all ranks, and return only this rank's rows of the sum (a reduce-scatter).

        ``rows``: summands for the rows of all ranks, in rank order. ``counts``: number of rows by rank.
        """
        most = max(counts)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        total = wide.new_empty((most, *rows.shape[1:]))
        if total.numel():
            shares = torch.cat([_padded(share, most) for share in wide.split(list(counts))])
            _reduce_scatter(total, shares, group=self.group)
        return total[: counts[self.rank]].to(rows.dtype)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: ContextRanks, counts: tuple[int, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.counts = counts
        return tuple(ranks.all_rows(part, counts) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *(ctx.ranks.own_sum(grad, ctx.counts) for grad in grads)


def _padded(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows.contiguous()
