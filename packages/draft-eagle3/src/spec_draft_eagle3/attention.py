"""Attention of the unrolled steps: causal over step 0, plus one key per later step at the query's own index.

The causal part is an ordinary kernel; each later step adds a "diagonal", one dot product per query; the two are
merged by log-sum-exp. No [T, T] mask is ever made.

Shapes: q ``[T, heads, head_dim]``; keys, values ``[T, kv_heads, head_dim]``. Where grouped queries matter, heads
are viewed as ``[T, kv_heads, group, head_dim]`` (suffix TKGD), so that keys broadcast over their group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core.kernels import Attended, DiagonalAttention
    from spec_core.ops import AttentionKernel, VocabularyOps

    Bounds = Sequence[tuple[int, int]]

SCORE_BYTES = 64 << 20
"""Size of a chunk's scores in the attention without a kernel: large enough that the matrix products dominate,
small against the activations of a step."""


def unrolled_attention(
    ops: VocabularyOps, q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: Bounds
) -> Tensor:
    """[T, heads, head_dim]: ``keys[0]`` are step 0's, ``keys[1:]`` those of the later steps up to the query's.

    Rows outside ``bounds`` (the documents) hold finite values without meaning.
    """
    if ops.attention is None:
        return _chunked_attention(q, keys, values, bounds)
    fused = ops.kernels.diagonals if ops.kernels is not None else None
    diagonals = fused if fused is not None and fused.takes(q) else PlainDiagonals()
    return _MergedAttention.apply((ops.attention, diagonals), bounds, q, *keys, *values)


class _MergedAttention(torch.autograd.Function):
    """A kernel's causal attention merged with the diagonals.

    The backward of a softmax needs the *whole* row: P = exp(score − lse), and the row's grad · out. So the kernel's
    backward gets the merged out and lse (differentiating a merge of two finished attentions through a kernel that
    treats its lse as a constant is wrong), and the diagonals' gradients follow by hand from the same two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: tuple[AttentionKernel, DiagonalAttention],
        bounds: Bounds,
        q: Tensor,
        *keys_values: Tensor,
    ) -> Tensor:
        keys, values = _halves(keys_values)
        out, lse = kernels[0].forward(q, keys[0], values[0], bounds)
        if len(keys) > 1:
            out, lse = kernels[1].merge(q, (out, lse), keys[1:], values[1:])
        ctx.kernels, ctx.bounds = kernels, bounds
        ctx.save_for_backward(q, out, lse, *keys_values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *keys_values = ctx.saved_tensors
        keys, values = _halves(keys_values)
        grads = ctx.kernels[0].backward(grad_out, (q, keys[0], values[0], out, lse), ctx.bounds)
        grad_q, grad_keys, grad_values = grads[0], [grads[1]], [grads[2]]
        if len(keys) > 1:
            diagonals = ctx.kernels[1].backward(grad_out, (q, out, lse), keys[1:], values[1:], grad_q)
            grad_q = diagonals[0]
            grad_keys += diagonals[1]
            grad_values += diagonals[2]
        return None, None, grad_q, *grad_keys, *grad_values


class PlainDiagonals:
    """DiagonalAttention (see ``spec_core.kernels``) in plain torch."""

    def takes(self, q: Tensor) -> bool:
        return True

    def merge(self, q: Tensor, attended: Attended, keys: list[Tensor], values: list[Tensor]) -> Attended:
        (out, lse), scores_TKGS = attended, _diagonal_scores(q, keys)
        lse_TKG = lse.reshape(scores_TKGS.shape[:-1])
        merged = torch.logaddexp(lse_TKG, scores_TKGS.logsumexp(-1))
        total = out.reshape(*merged.shape, out.shape[-1]) * (lse_TKG - merged).exp()[..., None]
        for weight, value in zip((scores_TKGS - merged[..., None]).exp().unbind(-1), values, strict=True):
            total += weight[..., None] * value[:, :, None]
        return total.reshape(out.shape).to(out.dtype), merged.reshape(lse.shape)

    def backward(
        self,
        grad_out: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        grad_q: Tensor,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        added, grad_keys, grad_values = _diagonal_gradients(grad_out, saved, keys, values)
        total = (added + grad_q.reshape(added.shape)).reshape(grad_q.shape).to(grad_q.dtype)
        return total, grad_keys, grad_values


def _diagonal_scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """[T, kv_heads, group, S diagonals] in float32 or wider."""
    q_TKGD = _grouped(q, keys[0])
    scores = [(q_TKGD * key[:, :, None]).sum(-1) for key in keys]
    return torch.stack(scores, dim=-1) * q.shape[-1] ** -0.5


def _diagonal_gradients(
    grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What the diagonals add to dq (wide, grouped), and their dk and dv; ``saved``: q and the merged out, lse."""
    q, out, lse = saved
    q_TKGD, grad_TKGD = _grouped(q, keys[0]), _grouped(grad_out, keys[0])
    weights = (_diagonal_scores(q, keys) - lse.reshape(*q_TKGD.shape[:-1], 1)).exp()
    row_TKG = (grad_TKGD * _grouped(out, keys[0])).sum(-1)
    grad_q = torch.zeros_like(q_TKGD)
    grad_keys: list[Tensor] = []
    grad_values: list[Tensor] = []
    for weight, key, value in zip(weights.unbind(-1), keys, values, strict=True):
        from_value = (grad_TKGD * value[:, :, None]).sum(-1)
        score = (weight * (from_value - row_TKG) * q.shape[-1] ** -0.5)[..., None]
        grad_q += score * key[:, :, None]
        grad_keys.append((score * q_TKGD).sum(2).to(key.dtype))
        grad_values.append((weight[..., None] * grad_TKGD).sum(2).to(value.dtype))
    return grad_q, grad_keys, grad_values


def _chunked_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: Bounds) -> Tensor:
    """Dense attention of a few queries at a time, recomputed in backward: for hardware without a kernel."""
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


def _dense_chunk(q: Tensor, key: Tensor, value: Tensor, *diagonals: Tensor) -> Tensor:
    """The last len(q) queries of a document against its first len(key) step-0 keys and their own diagonals."""
    keys, values = _halves(diagonals)
    q_TKGD = _grouped(q, key) * q.shape[-1] ** -0.5
    causal = torch.einsum("tkgd,ukd->tkgu", q_TKGD, key.to(q_TKGD.dtype))
    index = torch.arange(len(key), device=q.device)
    future = index > index[len(key) - len(q) :, None]
    scores = [causal.masked_fill(future[:, None, None], -torch.inf)]
    scores += [(q_TKGD * own[:, :, None]).sum(-1, keepdim=True) for own in keys]
    law, *diagonal_laws = torch.cat(scores, dim=-1).softmax(-1).split([len(key)] + [1] * len(keys), dim=-1)
    out = torch.einsum("tkgu,ukd->tkgd", law, value.to(law.dtype))
    for weight, own in zip(diagonal_laws, values, strict=True):
        out = out + weight * own[:, :, None]
    return out.reshape(q.shape).to(q.dtype)


def _grouped(heads: Tensor, like_kv: Tensor) -> Tensor:
    """[T, heads, D] -> [T, kv_heads, group, D], float32 or wider: products of bf16 numbers are summed there."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    rows, num_heads, head_dim = heads.shape
    return wide.reshape(rows, like_kv.shape[1], num_heads // like_kv.shape[1], head_dim)


def _halves(keys_values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    half = len(keys_values) // 2
    return list(keys_values[:half]), list(keys_values[half:])
