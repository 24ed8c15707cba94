"""Compute attention by torch-npu's ``npu_fusion_attention`` (kernels of attention, B10).

Documents are packed in its layout TND, with their cumulated lengths. Its masks are 1 where a key is hidden. A
causal mask is a fixed triangle, which the operator aligns at the last query and the last key of each sequence.

A query's probabilities are exp(score - max) / sum, by the operator's two statistics. Its backward pass computes them
again from the statistics and the output that it is given. So it is given those over all keys of a query, max =
log-sum-exp and sum = 1, even if it sees only some of the keys. MindSpeed's ring attention does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spec_kit.block_drafting import block_attention
from spec_kit.layers import PackedRows, as_wide, rows_of_pieces

if TYPE_CHECKING:
    from spec_kit.block_drafting import BlockLayout, KeysValues

_npu: Any = torch.ops.npu

Pair = tuple[int, int]
Pieces = Sequence[tuple[int, int, int]]

MAX_SEQUENCES = 1024
"""Largest number of sequences of a call in layout TND."""
TRIANGLE = 2048
"""Rows of the causal mask, whatever the lengths of sequences."""
STATISTIC_COLUMNS = 8
"""Number of equal columns in which the operator keeps a statistic."""
ALL_MASK, RIGHT_DOWN_CAUSAL, BAND = 1, 3, 4
"""Values of ``sparse_mode``."""


def npu_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[Pair], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return causal self-attention within each document, and its log-sum-exp."""
    return _attend(q, k, v, bounds, bounds, window)


def npu_causal_attention_backward(
    grad_out: Tensor, saved: tuple[Tensor, ...], bounds: Sequence[Pair], window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse), out and lse perhaps over further keys."""
    return _gradients(grad_out, saved, bounds, bounds, window)


def npu_prefixed_attention(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Return causal attention for the tokens of pieces of documents, and its log-sum-exp."""
    return _attend(q, k, v, *rows_of_pieces(pieces))


def npu_prefixed_attention_backward(
    grad_out: Tensor, saved: tuple[Tensor, ...], pieces: Pieces
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse), out and lse perhaps over further keys."""
    return _gradients(grad_out, saved, *rows_of_pieces(pieces))


def npu_block_attention(
    q: Tensor,
    context: KeysValues,
    own: KeysValues,
    layout: BlockLayout,
    window: int | None,
    is_causal: bool,
) -> Tensor:
    """Return the blocks' attention to their context and to themselves, by a mask for a few blocks at a time."""
    return block_attention(q, context, own, layout, window, is_causal, _masked_attention)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return the attention [Q, heads, D] of queries to the keys that ``visible`` [Q, keys] names."""
    inputs = (part.contiguous()[None] for part in (q, k, as_wide(v, q)))
    options = {"atten_mask": ~visible, "scale": q.shape[-1] ** -0.5, "sparse_mode": ALL_MASK}
    return _npu.npu_fusion_attention(*inputs, q.shape[1], "BSND", **options)[0][0, ..., : v.shape[-1]]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequence[Pair], keys: Sequence[Pair], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of each sequence of queries over its keys.

    The last rows of a sequence's keys are at the positions of its queries.
    """
    out: list[Tensor] = []
    lse: list[Tensor] = []
    if not queries:
        return q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[:2], dtype=torch.float32)
    for asking, seen in _calls(queries, keys, q.device):
        inputs = q[asking.rows], k[seen.rows], as_wide(v, q)[seen.rows]
        options = {"scale": q.shape[-1] ** -0.5, **_options(asking, seen, window)}
        part, largest, total, *_ = _npu.npu_fusion_attention(
            *map(Tensor.contiguous, inputs), q.shape[1], "TND", **options
        )
        out.append(asking.spread(part[..., : v.shape[-1]], len(q)))
        lse.append(asking.spread(largest[..., 0] + total[..., 0].log(), len(q)))
    return _sum(out), _sum(lse)


def _gradients(
    grad_out: Tensor,
    saved: tuple[Tensor, ...],
    queries: Sequence[Pair],
    keys: Sequence[Pair],
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of ``_attend``; those of a key of several sequences are summed."""
    q, k, v, out, lse = saved
    grad_out, wide_v, out = (as_wide(tensor, q) for tensor in (grad_out, v, out))
    if not queries:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grads: list[list[Tensor]] = [[], [], []]
    for asking, seen in _calls(queries, keys, q.device):
        inputs = q[asking.rows], k[seen.rows], wide_v[seen.rows], grad_out[asking.rows]
        largest = lse[asking.rows].float()[..., None].expand(-1, -1, STATISTIC_COLUMNS).contiguous()
        parts = _npu.npu_fusion_attention_grad(
            *map(Tensor.contiguous, inputs),
            q.shape[1],
            "TND",
            softmax_max=largest,
            softmax_sum=torch.ones_like(largest),
            attention_in=out[asking.rows].contiguous(),
            scale_value=q.shape[-1] ** -0.5,
            **_options(asking, seen, window),
        )
        for grad, part, rows, like in zip(grads, parts, (asking, seen, seen), (q, k, v), strict=False):
            grad.append(rows.spread(part[..., : like.shape[-1]], len(like)))
    dq, dk, dv = map(_sum, grads)
    return dq, dk, dv


def _calls(
    queries: Sequence[Pair], keys: Sequence[Pair], device: torch.device
) -> Iterator[tuple[PackedRows, PackedRows]]:
    """Yield the queries and keys of each call, with as many sequences as the operator takes."""
    for first in range(0, len(queries), MAX_SEQUENCES):
        part = slice(first, first + MAX_SEQUENCES)
        yield PackedRows.of(tuple(queries[part]), device), PackedRows.of(tuple(keys[part]), device)


def _options(asking: PackedRows, seen: PackedRows, window: int | None) -> dict[str, object]:
    """Return the arguments that both passes have: a causal mask, or a band of the last ``window`` keys."""
    mode = {"sparse_mode": RIGHT_DOWN_CAUSAL}
    if window is not None:
        mode = {"sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}
    return {
        **mode,
        "atten_mask": _triangle(asking.device),
        "actual_seq_qlen": asking.stops,
        "actual_seq_kvlen": seen.stops,
        # By default the statistics of a sequence are stored head by head.
        "softmax_layout": "TND",
    }


@lru_cache(maxsize=1)
def _triangle(device: torch.device) -> Tensor:
    return torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device).triu(1)


def _sum(parts: list[Tensor]) -> Tensor:
    """Return the sum of the calls' results; in rows of other calls a result is 0."""
    return sum(parts[1:], parts[0])
