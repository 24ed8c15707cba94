"""Call torch's fused causal attention on the CPU, with its log-sum-exp, once for each document.

Values may be narrower than queries and keys. torch's operators need equal widths, so zeros are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spec_kit.layers import as_wide

# The operators behind scaled_dot_product_attention on CPU; only they return the log-sum-exp. Layout
# [1, heads, T, head_dim], any strides; grouped queries are part of the kernel.
fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # pyright: ignore[reportPrivateUsage]
fused_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # pyright: ignore[reportPrivateUsage]

LEAST_CHUNK = 128
"""Rows that are computed at once with a window, if that is smaller."""


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[tuple[int, int]], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return causal self-attention within each document, and its log-sum-exp.

    The dtype is float64, float32 or bfloat16. ``window``: number of rows to which a row attends, itself included.
    """
    out = torch.zeros_like(q)
    wide_v = as_wide(v, q)
    lse = q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, mask in _chunks(bounds, window, q):
        part = fused_attention(
            *map(heads_first, (q[rows], k[keys], wide_v[keys])), 0.0, mask is None, attn_mask=mask
        )
        out[rows] = part[0][0].transpose(0, 1)
        lse[rows] = part[1][0].transpose(0, 1)
    return out[..., : v.shape[-1]], lse


def document_attention_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    bounds: Sequence[tuple[int, int]],
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse); lse is the log-sum-exp.

    ``out`` and ``lse`` may belong to attention over more keys than ``k`` has.
    """
    q, k, v, out, lse = saved
    grad_out, wide_v, out = (as_wide(tensor, q) for tensor in (grad_out, v, out))
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(wide_v)
    for rows, keys, mask in _chunks(bounds, window, q):
        inputs = (grad_out[rows], q[rows], k[keys], wide_v[keys], out[rows], lse[rows])
        parts = fused_attention_backward(*map(heads_first, inputs), 0.0, mask is None, attn_mask=mask)
        for grad, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[place] += part[0].transpose(0, 1)
    return *grads[:2], grads[2][..., : v.shape[-1]]


def _chunks(
    bounds: Sequence[tuple[int, int]], window: int | None, like: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield rows of documents, the rows to which they attend, and the mask to add; None if it is plainly causal."""
    for start, stop in bounds:
        if window is None or stop - start <= window:
            yield slice(start, stop), slice(start, stop), None
            continue
        step = max(window, LEAST_CHUNK)
        for first in range(start, stop, step):
            rows = slice(first, min(first + step, stop))
            keys = slice(max(start, first - window + 1), rows.stop)
            distance = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(keys.start, keys.stop)
            mask = like.new_zeros(distance.shape)
            yield rows, keys, mask.masked_fill_((distance < 0) | (distance >= window), -torch.inf)


def prefixed_attention(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, Tensor]:
    """Return causal attention for the tokens of pieces of documents, and its log-sum-exp.

    ``q`` has the queries of these tokens, one piece after the other. A piece is (first token of its document,
    first token of the piece, last token of the piece + 1), as indices of ``k`` and ``v``.
    """
    out = torch.zeros_like(q)
    wide_v = as_wide(v, q)
    lse = q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, is_causal in _rectangles(pieces):
        part = fused_attention(
            heads_first(q[rows]), heads_first(k[keys]), heads_first(wide_v[keys]), 0.0, is_causal
        )
        part_out, part_lse = part[0][0].transpose(0, 1), part[1][0].transpose(0, 1)
        if is_causal:
            out[rows] = part_out
            lse[rows] = part_lse
        else:
            merged = torch.logaddexp(lse[rows], part_lse)
            weights = [(one - merged).exp()[..., None] for one in (lse[rows], part_lse)]
            out[rows] = (out[rows] * weights[0] + part_out * weights[1]).to(q.dtype)
            lse[rows] = merged
    return out[..., : v.shape[-1]], lse


def prefixed_attention_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    pieces: Sequence[tuple[int, int, int]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse); lse is the log-sum-exp.

    ``out`` and ``lse`` may belong to attention over more keys than ``k`` has.
    """
    q, k, v, out, lse = saved
    grad_out, wide_v, out = (as_wide(tensor, q) for tensor in (grad_out, v, out))
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(wide_v)
    for rows, keys, is_causal in _rectangles(pieces):
        inputs = (grad_out[rows], q[rows], k[keys], wide_v[keys], out[rows], lse[rows])
        parts = fused_attention_backward(*map(heads_first, inputs), 0.0, is_causal)
        for grad, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[place] += part[0].transpose(0, 1)
    return *grads[:2], grads[2][..., : v.shape[-1]]


def _rectangles(pieces: Sequence[tuple[int, int, int]]) -> Iterator[tuple[slice, slice, bool]]:
    """Yield the parts of the attention matrix in which rows of ``q`` attend to rows of ``k``.

    Each part is a range of rows of ``q``, a range of rows of ``k``, and whether attention between them is
    causal.
    """
    row = 0
    for start, first, stop in pieces:
        rows = slice(row, row + stop - first)
        yield rows, slice(first, stop), True
        if start < first:
            yield rows, slice(start, first), False
        row = rows.stop


def heads_first(rows: Tensor) -> Tensor:
    """Return [T, heads, ...] as [1, heads, T, ...], a view."""
    return rows.transpose(0, 1).unsqueeze(0)
