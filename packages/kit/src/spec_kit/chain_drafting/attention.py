"""Attention of the unrolled steps: causal over step 0, plus one key per later step at the query's row.

An ordinary kernel computes the causal attention. Each later step adds one dot product per query. Both are merged by
their log-sum-exp. No [T, T] mask is ever allocated. Shapes as in ``kernels.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from spec_kit.chain_drafting.kernels import grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_kit.chain_drafting.kernels import Bounds, ChainKernels

SCORE_BYTES = 64 << 20
"""Bytes of the attention scores of one chunk, if no kernel computes the attention. It is large enough that matrix
products dominate, and small against the activations of a step."""


def unrolled_attention(
    kernels: ChainKernels,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    bounds: Bounds,
    row_R: Tensor | None = None,
) -> Tensor:
    """Return the attention [R, heads, head_dim] over the keys of step 0 and of the later steps.

    ``keys[0]`` [T, kv_heads, head_dim]: the keys of step 0; ``keys[s]`` [R, kv_heads, head_dim]: the keys of step
    s, up to the query's step. ``row_R``: int64, distinct: the row of each query among the T; None: every row.
    Rows outside ``bounds`` (the documents) get finite values without meaning.
    """
    if kernels.causal_attention is not None:
        return _MergedAttention.apply(kernels, bounds, row_R, q, *keys, *values)
    if row_R is None:
        return _chunked_attention(q, keys, values, bounds)
    whole_q, *later = (_spread(part, row_R, len(keys[0])) for part in (q, *keys[1:], *values[1:]))
    later_keys, later_values = _halves(later)
    attended = _chunked_attention(whole_q, [keys[0], *later_keys], [values[0], *later_values], bounds)
    return take_rows(attended, row_R)


def take_rows(rows: Tensor, row_R: Tensor) -> Tensor:
    """Return ``rows[row_R]``, if no index is repeated: then the backward copies gradients and sums none."""
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


class _MergedAttention(torch.autograd.Function):
    """The causal attention of a kernel, merged with the keys of the later steps.

    The backward of a softmax needs the *whole* row: P = exp(score − lse), and the row's grad · out. So the kernel's
    backward gets the merged out and lse (differentiating a merge of two finished attentions through a kernel that
    treats its lse as a constant is wrong), and the later keys' gradients follow by hand from the same two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ChainKernels,
        bounds: Bounds,
        row_R: Tensor | None,
        q: Tensor,
        *keys_values: Tensor,
    ) -> Tensor:
        keys, values = _halves(keys_values)
        assert kernels.causal_attention is not None
        # The kernel's queries are as many as its keys: those of the other rows are 0, and their results are dropped.
        whole_q = _spread(q, row_R, len(keys[0]))
        out, lse = (
            _take(part, row_R) for part in kernels.causal_attention(whole_q, keys[0], values[0], bounds)
        )
        if len(keys) > 1:
            out, lse = kernels.ttt_attention(q, (out, lse), keys[1:], values[1:])
        ctx.kernels, ctx.bounds, ctx.row_R = kernels, bounds, row_R
        ctx.save_for_backward(q, out, lse, *keys_values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, out, lse, *keys_values = ctx.saved_tensors
        keys, values = _halves(keys_values)
        kernels: ChainKernels = ctx.kernels
        assert kernels.causal_attention_backward is not None
        whole_grad, *whole = (_spread(part, ctx.row_R, len(keys[0])) for part in (grad_out, q, out, lse))
        saved = whole[0], keys[0], values[0], *whole[1:]
        grads = kernels.causal_attention_backward(whole_grad, saved, ctx.bounds)
        grad_q, grad_keys, grad_values = _take(grads[0], ctx.row_R), [grads[1]], [grads[2]]
        if len(keys) > 1:
            later = kernels.ttt_attention_backward(grad_out, (q, out, lse), keys[1:], values[1:], grad_q)
            grad_q = later[0]
            grad_keys += later[1]
            grad_values += later[2]
        return None, None, None, grad_q, *grad_keys, *grad_values


def _chunked_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: Bounds) -> Tensor:
    """Return the attention without a kernel: dense, a few queries at a time, recomputed in backward."""
    pieces: list[Tensor] = []
    cursor = 0
    # Without a document one row of padding runs, so that every parameter still gets its (zero) gradient.
    for start, stop in bounds or [(0, min(1, len(q)))]:
        pieces.append(torch.zeros_like(q[cursor:start]))
        rows = max(1, SCORE_BYTES // (4 * q.shape[1] * max(1, stop - start)))
        for first in range(start, max(stop, start + 1), rows):
            last = min(first + rows, stop)
            local = [tensor[first:last] for tensor in (*keys[1:], *values[1:])]
            causal = keys[0][start:last], values[0][start:last]
            pieces.append(checkpoint(_dense_chunk, q[first:last], *causal, *local, use_reentrant=False))
        cursor = stop
    return torch.cat([*pieces, torch.zeros_like(q[cursor:])])


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
    return out.reshape(q.shape).to(q.dtype)


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
