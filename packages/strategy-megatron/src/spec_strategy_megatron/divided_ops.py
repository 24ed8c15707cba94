"""DividedTargetOps divides the target's frozen tensors by vocabulary over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from spec_core import TargetSpec, TargetTensors
from spec_kit.layers import TargetOps


class DividedTargetOps(TargetOps):
    """Operations on embedding and head, of which rank r has the rows ``bounds[r]`` to ``bounds[r + 1]``.

    See ``spec_core.ops`` for the contract.
    """

    def __init__(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        device: torch.device,
        dtype: torch.dtype,
        bounds: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        """Move this rank's rows to ``device`` in ``dtype``."""
        self._group = group
        rank = dist.get_rank(group)
        self._range = bounds[rank], bounds[rank + 1]
        self._shard_rows = max(stop - first for first, stop in pairwise(bounds))
        rows = slice(*self._range)
        own = replace(tensors, embedding_VH=tensors.embedding_VH[rows], head_VH=tensors.head_VH[rows])
        super().__init__(target, own, device, dtype)

    @property
    def vocab_range(self) -> tuple[int, int]:
        """First token id of this rank's shard of the vocabulary, and the id after its last token id."""
        return self._range

    @property
    def shard_rows(self) -> int:
        """Number of vocabulary ids in the largest shard (O5)."""
        return self._shard_rows

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, each from the rank that has the row (O1)."""
        first, stop = self._range
        here = (input_ids >= first) & (input_ids < stop)
        rows = super().embed((input_ids - first).clamp(0, stop - first - 1))
        return self.reduce_sum(rows * here[..., None])

    def reduce_max(self, value_R: Tensor) -> Tensor:
        """Return the maximum over ranks (O3)."""
        return self._reduced(value_R, dist.ReduceOp.MAX)

    def reduce_sum(self, value_R: Tensor) -> Tensor:
        """Return the sum over ranks (O3)."""
        return self._reduced(value_R, dist.ReduceOp.SUM)

    def _reduced(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        result = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, operation, group=self._group)
        return result


def vocabulary_bounds(vocab_mask_V: Tensor | None, vocab_size: int, parts: int) -> list[int]:
    """Return the bounds of ``parts`` shards of the vocabulary, as token ids.

    The shards have equal size. With ``vocab_mask_V`` they have equally many token ids for which the mask is
    True.
    """
    if vocab_mask_V is None:
        return [rank * vocab_size // parts for rank in range(parts + 1)]
    ids = vocab_mask_V.nonzero().squeeze(1).tolist()
    return [0, *(ids[rank * len(ids) // parts] for rank in range(1, parts)), vocab_size]
