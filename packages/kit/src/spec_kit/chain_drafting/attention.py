"""Compute the attention of the unrolled steps of a training-time test.

A query sees the causal keys of step 0, and of each later step only the key at its row. An ordinary kernel computes
the causal attention. Each later step adds one dot product per query. Both are merged by their log-sum-exp. No
[T, T] mask is ever allocated. Shapes are named as in ``kernels.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from spec_kit.chain_drafting.kernels import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from spec_kit.chain_drafting.kernels import Bounds, ChainKernels, Pieces
    from spec_kit.drafting import ContextRows

SCORE_BYTES = 64 << 20
"""Bytes of the attention scores of one chunk, if no kernel computes the attention. It is large enough that matrix
products dominate, and small compared with the activations of a step."""


def unrolled_attention(
    kernels: ChainKernels,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    bounds: Bounds,
    row_R: Tensor | None = None,
    rows: ContextRows | None = None,
    local_R: Tensor | None = None,
) -> Tensor:
    """Return the attention [R, heads, width of values] of R queries over the keys of all unrolled steps so far.

    ``keys[0]`` [T, kv_heads, head_dim]: the keys of step 0, one for each of T rows (tokens); ``keys[s]`` [R,
    kv_heads, head_dim]: the keys of step s, one for each query. ``values`` has the same shapes, but its heads may
    be narrower. ``bounds``: first row of each document, and the row after its last; queries outside the documents get
    finite values without meaning. ``row_R``: int64, distinct indices of the queries' rows among the T rows; None if
    all rows have a query. ``rows``: the rows that this rank computes, if ranks divide the rows. ``local_R``: int64,
    indices of the queries' rows among the rows of this rank; None if each of these rows has a query.
    """
    if (causal := _Causal.of(kernels, bounds, len(keys[0]), row_R, rows, local_R)) is not None:
        return _MergedAttention.apply(kernels, causal, q, *keys, *values)
    if row_R is None:
        return _chunked_attention(q, keys, values, bounds)
    whole_q, *later = (_spread(part, row_R, len(keys[0])) for part in (q, *keys[1:], *values[1:]))
    later_keys, later_values = _halves(later)
    attended = _chunked_attention(whole_q, [keys[0], *later_keys], [values[0], *later_values], bounds)
    return take_rows(attended, row_R)


def take_rows(rows: Tensor, row_R: Tensor) -> Tensor:
    """Return ``rows[row_R]``. No index may be repeated, because backward copies gradients without sums."""
    result: Tensor = _TakenRows.apply(rows, row_R)
    return result


class _TakenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_R: Tensor) -> Tensor:
        ctx.save_for_backward(row_R)
        ctx.num_rows = len(rows)
        return rows.index_select(0, row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_R,) = ctx.saved_tensors
        return _spread(grad, row_R, ctx.num_rows), None


@dataclass(frozen=True)
class _Causal:
    """The causal attention of step 0, computed by a kernel.

    A row without a query gets a query of zeros, and its result is dropped.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    parts: Bounds | Pieces
    """The documents, or their pieces, that the kernel is given."""
    num_rows: int
    """Number of rows for which the kernel takes a query."""
    local_R: Tensor | None
    """int64: index of each query's row among the ``num_rows`` rows; None if every row has a query."""

    @classmethod
    def of(
        cls,
        kernels: ChainKernels,
        bounds: Bounds,
        num_keys: int,
        row_R: Tensor | None,
        rows: ContextRows | None,
        local_R: Tensor | None,
    ) -> _Causal | None:
        """Return the attention that calls one of ``kernels``; None if there is no such kernel.

        With context parallelism (``rows`` has a group), prefer a kernel that computes only this rank's rows. Any
        other kernel computes all rows.
        """
        forward, backward = kernels.prefixed_attention, kernels.prefixed_attention_backward
        if rows is not None and rows.group is not None and forward is not None and backward is not None:
            return cls(forward, backward, rows.pieces, len(rows.row_P), local_R)
        forward, backward = kernels.causal_attention, kernels.causal_attention_backward
        if forward is None or backward is None:
            return None
        return cls(forward, backward, bounds, num_keys, row_R)

    def attend(self, q: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's output and log-sum-exp for each query."""
        out, lse = self.forward(self._whole(q), key, value, self.parts)
        return _take(out, self.local_R), _take(lse, self.local_R)

    def gradients(
        self, grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. ``saved``: q, k, v, output and log-sum-exp."""
        q, key, value, out, lse = saved
        whole = self._whole(q), key, value, self._whole(out), self._whole(lse)
        grad_q, grad_key, grad_value = self.backward(self._whole(grad_out), whole, self.parts)
        return _take(grad_q, self.local_R), grad_key, grad_value

    def _whole(self, rows: Tensor) -> Tensor:
        return _spread(rows, self.local_R, self.num_rows)


class _MergedAttention(torch.autograd.Function):
    """The causal attention of a kernel, merged with the keys of the later steps.

    A key's gradient depends on its attention weight exp(score − lse) and on grad · out. lse and out must be over
    *all* keys of the query. So the kernel's backward pass gets the merged out and lse, and the gradients of the
    later keys are computed here from the same out and lse. Differentiating the merge would be wrong, because the
    kernel treats its lse as a constant.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ChainKernels,
        causal: _Causal,
        q: Tensor,
        *keys_values: Tensor,
    ) -> Tensor:
        keys, values = _halves(keys_values)
        out, lse = causal.attend(q, keys[0], values[0])
        if len(keys) > 1:
            out, lse = kernels.ttt_attention(q, (out, lse), keys[1:], values[1:])
        ctx.kernels, ctx.causal = kernels, causal
        ctx.save_for_backward(q, out, lse, *keys_values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, out, lse, *keys_values = ctx.saved_tensors
        keys, values = _halves(keys_values)
        kernels: ChainKernels = ctx.kernels
        grad_q, *grads = ctx.causal.gradients(grad_out, (q, keys[0], values[0], out, lse))
        grad_keys, grad_values = [grads[0]], [grads[1]]
        if len(keys) > 1:
            later = kernels.ttt_attention_backward(grad_out, (q, out, lse), keys[1:], values[1:], grad_q)
            grad_q = later[0]
            grad_keys += later[1]
            grad_values += later[2]
        return None, None, grad_q, *grad_keys, *grad_values


def _chunked_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: Bounds) -> Tensor:
    """Return the attention without a kernel: dense, a few queries at a time, recomputed in backward."""
    pieces: list[Tensor] = []
    cursor = 0
    # Without a document, one row of padding is computed, so that every parameter gets a (zero) gradient.
    for start, stop in bounds or [(0, min(1, len(q)))]:
        pieces.append(q.new_zeros(max(0, start - cursor), q.shape[1], values[0].shape[-1]))
        rows = max(1, SCORE_BYTES // (4 * q.shape[1] * max(1, stop - start)))
        for first in range(start, max(stop, start + 1), rows):
            last = min(first + rows, stop)
            local = [tensor[first:last] for tensor in (*keys[1:], *values[1:])]
            causal = keys[0][start:last], values[0][start:last]
            pieces.append(checkpoint(_dense_chunk, q[first:last], *causal, *local, use_reentrant=False))
        cursor = stop
    return torch.cat([*pieces, q.new_zeros(max(0, len(q) - cursor), q.shape[1], values[0].shape[-1])])


def _dense_chunk(q: Tensor, key: Tensor, value: Tensor, *own_keys_values: Tensor) -> Tensor:
    """Return the attention of consecutive queries of one document.

    ``key``, ``value``: of step 0, from the document's start to the last query. ``own_keys_values``: keys, then
    values of the later steps, each with one row per query.
    """
    keys, values = _halves(own_keys_values)
    q_TKGD = grouped(q, key) * q.shape[-1] ** -0.5
    causal = torch.einsum("tkgd,ukd->tkgu", q_TKGD, key.to(q_TKGD.dtype))
    index = torch.arange(len(key), device=q.device)
    future = index > index[len(key) - len(q) :, None]
    scores = [causal.masked_fill(future[:, None, None], -torch.inf)]
    scores += [(q_TKGD * own[:, :, None]).sum(-1, keepdim=True) for own in keys]
    causal_probs, *own_probs = (
        torch.cat(scores, dim=-1).softmax(-1).split([len(key)] + [1] * len(keys), dim=-1)
    )
    out = torch.einsum("tkgu,ukd->tkgd", causal_probs, value.to(causal_probs.dtype))
    for weight, own in zip(own_probs, values, strict=True):
        out = out + weight * own[:, :, None]
    return out.reshape(*q.shape[:2], -1).to(q.dtype)


def _take(rows: Tensor, row_R: Tensor | None) -> Tensor:
    return rows if row_R is None else rows.index_select(0, row_R)


def _spread(rows: Tensor, row_R: Tensor | None, num_rows: int) -> Tensor:
    """Return ``num_rows`` rows: ``rows`` at the indices ``row_R``, and 0 elsewhere."""
    if row_R is None:
        return rows
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_copy_(0, row_R, rows)


def _halves(keys_values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    half = len(keys_values) // 2
    return list(keys_values[:half]), list(keys_values[half:])
