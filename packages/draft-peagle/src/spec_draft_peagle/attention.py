"""Compute the attention of rows, and of chains of mask tokens; each chain starts at one row.

A row attends causally within its document. A mask token attends to the rows of its document up to the row where its
chain starts, and to earlier mask tokens of its chain and itself.

Shapes: R rows of a segment (a range of the batch's rows), P rows up to the segment's end, A chains, C mask
tokens; q ``[R, heads, D]``, keys and values ``[…, kv_heads, D]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from spec_kit.block_drafting import BlockLayout

if TYPE_CHECKING:
    from torch import Tensor

    from spec_draft_peagle.chains import Segment
    from spec_draft_peagle.kernels import PEagleKernels
    from spec_kit.block_drafting import KeysValues

EVERYTHING = 1 << 30
"""A window wider than any document. Chains use sliding-window attention because it is causal; nothing may be
outside its window."""


def row_attention(q: Tensor, keys_values: KeysValues, segment: Segment) -> Tensor:
    """Return the attention [R, heads, D] of a segment's rows.

    A row attends to rows of its document in this segment and in earlier segments.
    """
    pieces: list[Tensor] = []
    for start, stop in segment.bounds:
        first, last = max(start, segment.first), min(stop, segment.stop)
        if first < last:
            k, v = (tensor[start:last] for tensor in keys_values)
            pieces.append(_causal(q[first - segment.first : last - segment.first], k, v))
    if not pieces:  # every input needs a gradient, which is zero here
        return q + sum(tensor.sum() for tensor in keys_values)
    return torch.cat(pieces)


def chain_attention(
    kernels: PEagleKernels, qkv: tuple[Tensor, ...], rows: KeysValues, segment: Segment
) -> Tensor:
    """Return the mask tokens' attention [C, heads, D].

    ``qkv``: queries, keys and values of the mask tokens. ``rows``: keys and values of all rows up to the
    segment's end.
    """
    q, k, v = (_by_chain(tensor, segment) for tensor in qkv)
    layout = BlockLayout(segment.anchor_A + 1, segment.start_A, q.device)
    attended = kernels.block_attention(q, rows, (k, v), layout, EVERYTHING)
    return attended[segment.chain_C.to(q.device), segment.slot_C.to(q.device)]


def _by_chain(value_C: Tensor, segment: Segment) -> Tensor:
    """Return the mask tokens' values grouped by chain, [A, longest chain, heads, D].

    Shorter chains are padded with zeros at the end.
    """
    longest = int(segment.count_A.max()) if len(segment.count_A) else 1
    zeros = value_C.new_zeros(len(segment.count_A), longest, *value_C.shape[1:])
    place = segment.chain_C.to(value_C.device), segment.slot_C.to(value_C.device)
    return zeros.index_put(place, value_C)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of queries that belong to the last len(q) rows of k and v."""
    group, is_whole = q.shape[1] // k.shape[1], len(q) == len(k)
    heads = q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = None
    if not is_whole:
        row = torch.arange(len(k), device=q.device)
        mask = row <= row[len(k) - len(q) :, None]
    out = F.scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in heads), attn_mask=mask, is_causal=is_whole
    )
    return out[0].transpose(0, 1)
