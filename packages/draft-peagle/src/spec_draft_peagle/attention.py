"""Compute the attention of rows, and of chains of mask tokens; each chain starts at one row.

A row attends causally within its document. A mask token attends to the rows of its document up to the row where its
chain starts, and to earlier mask tokens of its chain and itself.

Shapes: R rows of a segment (a range of the batch's rows), P rows up to the segment's end, N queries of rows, C mask
tokens; q ``[…, heads, D]``, keys and values ``[…, kv_heads, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from spec_draft_peagle.chains import Segment
from spec_draft_peagle.kernels import PEagleKernels
from spec_kit.block_drafting import KeysValues
from spec_kit.chain_drafting import take_rows

Pieces = Sequence[tuple[int, int, int]]
"""First row of a document, first row of its piece in a segment, and the row after the piece's last row."""


def row_attention(
    kernels: PEagleKernels,
    q: Tensor,
    keys_values: KeysValues,
    segment: Segment,
    row_N: Tensor | None = None,
) -> Tensor:
    """Return the attention [N, heads, D] of some rows of a segment.

    A row attends to rows of its document in this segment and in earlier segments. ``row_N``: int64, index in the
    segment of each query's row; None if every row has a query.
    """
    if row_N is not None:
        num_rows = segment.stop - segment.first
        every_q = q.new_zeros(num_rows, *q.shape[1:]).index_copy(0, row_N, q)
        return take_rows(row_attention(kernels, every_q, keys_values, segment), row_N)
    if not segment.pieces:  # every input needs a gradient, which is zero here
        return q + sum(tensor.sum() for tensor in keys_values)
    if kernels.prefixed_attention is not None and kernels.prefixed_attention_backward is not None:
        return _KernelAttention.apply(kernels, segment.pieces, q, *keys_values)  # pyright: ignore[reportReturnType]
    queries = q.split([stop - first for _, first, stop in segment.pieces])
    return torch.cat(
        [
            _causal(part, *(tensor[start:stop] for tensor in keys_values))
            for part, (start, _, stop) in zip(queries, segment.pieces, strict=True)
        ]
    )


def chain_attention(
    kernels: PEagleKernels, qkv: tuple[Tensor, ...], rows: KeysValues, segment: Segment
) -> Tensor:
    """Return the mask tokens' attention [C, heads, D], the chains of each length in one call of the kernel.

    ``qkv``: queries, keys and values of the mask tokens. ``rows``: keys and values of all rows up to the
    segment's end.
    """
    sizes = [length * len(layout.anchor_A) for length, layout in segment.layouts]
    pieces = [qkv[0][:0]]
    for (length, layout), *parts in zip(segment.layouts, *(part.split(sizes) for part in qkv), strict=True):
        q, k, v = (part.unflatten(0, (-1, length)) for part in parts)
        pieces.append(kernels.block_attention(q, rows, (k, v), layout, None, True).flatten(0, 1))
    return torch.cat(pieces)


class _KernelAttention(torch.autograd.Function):
    """The rows' attention, computed by the kernels ``prefixed_attention`` and its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, kernels: PEagleKernels, pieces: Pieces, q: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        assert kernels.prefixed_attention is not None
        out, lse = kernels.prefixed_attention(q, key, value, pieces)
        ctx.kernels = kernels
        ctx.pieces = pieces
        ctx.save_for_backward(q, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *ctx.kernels.prefixed_attention_backward(grad_out, ctx.saved_tensors, ctx.pieces)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of queries that belong to the last len(q) rows of k and v."""
    group = q.shape[1] // k.shape[1]
    is_whole = len(q) == len(k)
    heads = q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = None
    if not is_whole:
        row = torch.arange(len(k), device=q.device)
        mask = row <= row[len(k) - len(q) :, None]
    out = F.scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in heads), attn_mask=mask, is_causal=is_whole
    )
    return out[0].transpose(0, 1)
