"""VocabularyOps: the frozen, vocabulary-wide half of a draft's step.

The target's embedding, head and final norm never become parameters of the draft: they live here, outside
sharding, checkpoints and optimizer. On one device the implementation is plain
(``spec_kit.drafting.target_ops.TargetOps``); a tensor-parallel strategy supplies one whose vocabulary axis is
sharded.

Contract:

O1  ``embed`` gives rows of the target's embedding as stored, in the compute dtype, without a gradient.
O2  ``teacher_logits`` gives float32 logits of the target (final norm, head, logit scale, soft-cap) over the
    *local* vocabulary rows ``vocab_range``, without a gradient. It makes [R, V]: callers hand over a few rows.
O3  ``reduce_max`` and ``reduce_sum`` combine a value per row over all vocabulary shards; on one device they
    return their argument.
O4  ``head_VH`` is the target's head as stored, local rows only, in the compute dtype, without a gradient: a draft
    that shares the head multiplies by it, chunk by chunk. Its gradient with respect to the states is partial too.
O5  Every shard makes the same calls of ``reduce_max`` and ``reduce_sum``: chunks that depend on the vocabulary's size
    depend on ``shard_rows``, which is the same on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 4 << 20
"""Least memory of a chunk's logits. Some ten passes go over them: on a CPU they should stay in cache (64 MiB cost a
quarter more per step); large targets are ruled by the size of their head."""


class VocabularyOps(ABC):
    """The target's frozen embedding, head and final norm; the module's docstring has the contract."""

    @property
    @abstractmethod
    def vocab_range(self) -> tuple[int, int]:
        """First and one past the last vocabulary id of the local shard."""

    @property
    def shard_rows(self) -> int:
        """Vocabulary ids of the largest shard (O5)."""
        first, stop = self.vocab_range
        return stop - first

    @property
    @abstractmethod
    def head_VH(self) -> Tensor:
        """The target's head, local rows only, [V_local, H] in the compute dtype (O4)."""

    @property
    def chunk_bytes(self) -> int:
        """Memory that a chunk's logits may take (O5): that of the head, so that reading it is paid back, or more."""
        head_VH = self.head_VH
        head_bytes = self.shard_rows * head_VH.shape[1] * head_VH.element_size()
        return max(CHUNK_BYTES, head_bytes)

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Return rows of the target's embedding: ids [...] -> [..., H] (O1)."""

    @abstractmethod
    def teacher_logits(self, hidden_RH: Tensor) -> Tensor:
        """Return the target's logits, [R, V_local] float32, from inputs [R, H] of its final norm (O2)."""

    @abstractmethod
    def reduce_max(self, value_R: Tensor) -> Tensor:
        """Return the element-wise maximum over all vocabulary shards (O3)."""

    @abstractmethod
    def reduce_sum(self, value_R: Tensor) -> Tensor:
        """Return the sum over all vocabulary shards (O3)."""
