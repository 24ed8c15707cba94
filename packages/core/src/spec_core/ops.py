"""VocabularyOps: the frozen, vocabulary-wide half of a draft's step; AttentionKernel: its causal attention.

The target's embedding, head and final norm never become parameters of the draft: they live here, outside
sharding, checkpoints, optimizer and weight sync. On one device the implementation is plain
(``spec_core.target_ops.TargetOps``); a tensor-parallel strategy supplies one whose vocabulary axis is sharded.

Contract:

O1  ``embed`` gives rows of the target's embedding as stored, in the compute dtype, without a gradient.
O2  ``teacher_logits`` gives float32 logits of the target (final norm, head, logit scale, soft-cap) over the
    *local* vocabulary rows ``vocab_range``, without a gradient. It makes [R, V]: callers hand over a few rows.
O3  ``reduce_max`` and ``reduce_sum`` combine a value per row over all vocabulary shards; on one device they
    return their argument.
O4  ``head_VH`` is the target's head as stored, local rows only, in the compute dtype, without a gradient: a draft
    that shares the head multiplies by it, chunk by chunk. Its gradient with respect to the states is partial too.
O5  ``attention`` and ``kernels`` are the backend's, or None: then drafts use plain torch. Who builds ops sets them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core.kernels import Kernels


class AttentionKernel(Protocol):
    """Causal self-attention over documents, scale ``head_dim ** -0.5``.

    Shapes: q ``[T, heads, head_dim]``; k, v ``[T, kv_heads, head_dim]`` (grouped queries); ``bounds`` the
    (start, stop) of each document. Rows outside every document are 0 in every result.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """(out like q, natural-log log-sum-exp [T, heads], float32 or wider)."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        bounds: Sequence[tuple[int, int]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) for ``saved = (q, k, v, out, lse)``; out and lse may be merged with further keys."""
        ...


class VocabularyOps(ABC):
    """See the module's contract."""

    attention: AttentionKernel | None
    """The backend's kernel, or None: then the draft uses chunked dense attention."""
    kernels: Kernels | None = None
    """What else the backend does faster than ``spec_core.plain_kernels``."""

    @property
    @abstractmethod
    def vocab_range(self) -> tuple[int, int]:
        """First and one past the last vocabulary id of the local shard."""

    @property
    @abstractmethod
    def head_VH(self) -> Tensor:
        """O4: [V_local, H]."""

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """O1: ids [...] -> [..., H]."""

    @abstractmethod
    def teacher_logits(self, hidden_RH: Tensor) -> Tensor:
        """O2: inputs of the target's final norm [R, H] -> [R, V_local] float32."""

    @abstractmethod
    def reduce_max(self, value_R: Tensor) -> Tensor:
        """O3: element-wise maximum over shards."""

    @abstractmethod
    def reduce_sum(self, value_R: Tensor) -> Tensor:
        """O3: sum over shards."""
