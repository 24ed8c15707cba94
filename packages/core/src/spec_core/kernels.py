"""Kernels: what a backend may do faster than plain torch, beside its causal attention.

``spec_core.plain_kernels.PlainKernels`` is the whole set in plain torch, for every device and dtype. A backend
derives from it and replaces what it does better; results may differ by rounding only. What is None there has its
plain version in the draft that it belongs to.

Shapes: T tokens, N heads, K key-value heads, D head_dim, H width, I intermediate width; A blocks of B slots; S keys
per query; R positions, X any rows, V the local rows of the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    Attended = tuple[Tensor, Tensor]
    """out [T, N, D], and natural-log log-sum-exp [T, N], float32 or wider."""
    Law = tuple[Tensor, Tensor]
    """Logits [R, V] and their log-sum-exp [R] over all shards: softmax = exp(logits − log-sum-exp)."""


class DiagonalAttention(Protocol):
    """Further keys of each query at its own index: ``keys`` and ``values`` are S tensors [T, K, D]; scale
    ``head_dim ** -0.5``."""

    def takes(self, q: Tensor) -> bool:
        """Whether dtype and shape are among those that it is written for."""
        ...

    def merge(self, q: Tensor, attended: Attended, keys: list[Tensor], values: list[Tensor]) -> Attended:
        """``attended`` over some keys -> attended over these and the diagonal keys. May reuse its memory."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        grad_q: Tensor,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(dq, dk, dv) for ``saved = (q, out, lse)``, all merged; ``grad_q`` is the other keys' share of dq, whose
        memory may be reused."""
        ...


class BlockAttention(Protocol):
    """Blocks that see their document before their anchor, and themselves; never another block. Differentiable."""

    def __call__(
        self,
        q: Tensor,
        context: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        places: tuple[Tensor, Tensor],
        window: int | None,
    ) -> Tensor:
        """[A, B, N, D] like ``q``. ``context``: k, v [T, K, D]; ``own``: k, v [A, B, K, D]; ``places``: int64 [A] on
        the device, each block's anchor (ascending) and the start of its document: it sees tokens from start to
        anchor − 1. ``window`` None: a block looks both ways inside itself. Else a slot at index p sees the context
        from p − (window − 1) on, and its own block up to itself."""
        ...

    def takes(self, q: Tensor, num_kv_heads: int) -> bool:
        """Whether dtype and shape are among those that it is written for."""
        ...


class Kernels(Protocol):
    """See the module's docstring."""

    diagonals: DiagonalAttention | None
    blocks: BlockAttention | None

    def mlp(self, x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
        """SwiGLU: down(silu(gate(x)) · up(x)), like ``x``."""
        ...

    def rotate(self, heads_TND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``spec_core.rope.rotate``."""
        ...

    def norm_rotate(
        self, heads_TND: Tensor, weight_D: Tensor, eps: float, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """RMS norm of each head, then ``rotate``."""
        ...

    def summarize(self, logits_XV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row, in float32 or wider: the largest logit, Σ exp(logit − largest); and the largest's index. A row
        that holds a NaN has a NaN for a sum, and any index inside the row."""
        ...

    def compare(
        self, logits_RSV: Tensor, log_sum_RS: Tensor, teacher: Law, mass_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With q the rows' softmax and p the teacher's: Σ p · logit, Σ min(mass · p, q) and Σ q where q < mass · p,
        all [R, S], of the local rows."""
        ...

    def gradient_(
        self,
        logits_RSV: Tensor,
        log_sum_RS: Tensor,
        factors: tuple[Tensor, Tensor, Tensor],
        teacher: Law,
        mass_R: Tensor,
    ) -> Tensor:
        """Overwrites the logits by a · q + b · (q where q < mass · p) − c · p for the factors a, b, c [R, S]."""
        ...

    def scaled_softmax_(self, logits_XV: Tensor, log_sum_X: Tensor, factor_X: Tensor) -> Tensor:
        """Overwrites the logits by factor · softmax."""
        ...
