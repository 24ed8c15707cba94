"""VocabularyOps gives a draft's training step the target's frozen embedding, final norm and head.

These weights never become parameters of the draft: VocabularyOps has them, outside sharding, checkpoints and
optimizer. ``spec_kit.layers.target_ops.TargetOps`` is the implementation for one device. A tensor-parallel
strategy supplies an implementation whose vocabulary axis is sharded.

Contract:

O1  ``embed`` returns rows of the target's stored embedding, in the compute dtype, without a gradient.
O2  ``teacher_logits`` gives logits of the target (final norm, head, logit scale, soft-cap) over the *local*
    vocabulary rows ``vocab_range``, without a gradient. They have the compute dtype, or float32 or wider if scale or
    soft-cap change them. A softmax of them is computed in float32 or wider. It allocates [R, V_local], so callers
    pass a few rows at a time.
O3  ``reduce_max`` and ``reduce_sum`` combine a value per row over all vocabulary shards; on one device they
    return their argument.
O4  ``head_VH`` has the local rows of the target's head as stored, in the compute dtype, without a gradient. A draft
    that shares the head multiplies by ``head``, chunk by chunk. The gradient of the hidden states from the local
    rows is a partial sum over the vocabulary.
O5  Every shard makes the same calls of ``reduce_max`` and ``reduce_sum``. So a chunk size that depends on the
    vocabulary's size is computed from ``shard_rows``, which is the same on all shards.
O6  All products with the head, also in ``teacher_logits``, are computed by ``head``. ``use_head`` replaces ``head``.
    A draft that guesses by some rows of the head takes them from ``head`` (``LinearWeight.take``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 4 << 20
"""Smallest limit for the bytes of a chunk's logits on a CPU. A step reads and writes the logits about ten times, so
they should fit in the cache (chunks of 64 MiB take a quarter longer)."""
DEVICE_CHUNK_BYTES = 1 << 30
"""Smallest limit on an accelerator. The host starts some dozens of operations for each chunk, so chunks must be large
enough for the device to compute longer than that takes."""


@dataclass(frozen=True)
class LinearWeight:
    """The weight of a linear layer, and its products with rows; subclasses use another precision."""

    weight: Tensor
    """Weight [N, K] of a layer with N outputs and K inputs."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's output [..., N] for ``rows`` [..., K]; not differentiable in subclasses."""
        return rows @ self.weight.T

    def backward(self, grad: Tensor) -> Tensor:
        """Return the gradient [..., K] of the layer's input from ``grad``, its output's gradient [..., N]."""
        return grad @ self.weight

    def take(self, index_N: Tensor) -> LinearWeight:
        """Return the weight of some of the outputs, in the same precision; ``index_N``: int64, their indices."""
        return LinearWeight(self.weight[index_N])


class VocabularyOps(ABC):
    """The target's frozen embedding, head and final norm; the module's docstring has the contract."""

    _head: LinearWeight | None = None

    @property
    @abstractmethod
    def vocab_range(self) -> tuple[int, int]:
        """First vocabulary id of the local shard, and one past its last id."""

    @property
    def shard_rows(self) -> int:
        """Number of vocabulary ids in the largest shard (O5)."""
        first, stop = self.vocab_range
        return stop - first

    @property
    @abstractmethod
    def head_VH(self) -> Tensor:
        """Weight of the target's head: the local rows, [V_local, H] in the compute dtype (O4)."""

    @property
    def head(self) -> LinearWeight:
        """The products with ``head_VH`` (O6)."""
        return self._head or LinearWeight(self.head_VH)

    def use_head(self, head: LinearWeight) -> None:
        """Use ``head`` for all later products with the head's weight (O6)."""
        self._head = head

    @property
    def chunk_bytes(self) -> int:
        """Limit for the bytes of a chunk's logits (O5): the head's size, or the smallest limit if that is more."""
        head_VH = self.head_VH
        head_bytes = self.shard_rows * head_VH.shape[1] * head_VH.element_size()
        return max(CHUNK_BYTES if head_VH.is_cpu else DEVICE_CHUNK_BYTES, head_bytes)

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the target's embeddings [..., H] of the token ids [...] (O1)."""

    @abstractmethod
    def teacher_logits(self, hidden_RH: Tensor) -> Tensor:
        """Return the target's logits, [R, V_local], from inputs [R, H] of its final norm (O2)."""

    @abstractmethod
    def reduce_max(self, value_R: Tensor) -> Tensor:
        """Return the element-wise maximum over all vocabulary shards (O3)."""

    @abstractmethod
    def reduce_sum(self, value_R: Tensor) -> Tensor:
        """Return the element-wise sum over all vocabulary shards (O3)."""
