"""Compute torch's fused causal attention, with all documents of a batch in one call.

In half precision, cuDNN computes documents of about equal length (``padded_attention``), and flash attention all
others; wider dtypes use the slower ``dense_attention``. Values may be narrower than queries and keys. Rows outside
every document are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from spec_backend_cuda import dense_attention
from spec_backend_cuda.padded_attention import padded_attention, padded_attention_backward, padding
from spec_core import Kernel
from spec_kit.layers import PackedRows, as_wide, rows_of_pieces

# The operators behind scaled_dot_product_attention; only they return the log-sum-exp and take documents of
# different lengths without padding.
_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8

Pair = tuple[int, int]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[Pair], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return causal self-attention within each document, and its log-sum-exp, for any dtype and shape.

    ``window``: number of rows to which a row attends, itself included.
    """
    return _attend(q, k, v, bounds, bounds, window)


def flash_attention_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    bounds: Sequence[Pair],
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse); lse is the log-sum-exp.

    ``out`` and ``lse`` may belong to attention over more keys than ``k`` has.
    """
    return _gradients(grad_out, saved, bounds, bounds, window)


def flash_attention_of_pieces(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, Tensor]:
    """Return causal attention for the tokens of pieces of documents, and its log-sum-exp.

    Any dtype and shape is supported. ``q`` has the queries of these tokens, one piece after the other. A
    piece is (first token of its document, first token of the piece, last token of the piece + 1), as indices
    of ``k`` and ``v``.
    """
    return _attend(q, k, v, *rows_of_pieces(pieces))


def flash_attention_of_pieces_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    pieces: Sequence[tuple[int, int, int]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse); lse is the log-sum-exp.

    ``out`` and ``lse`` may belong to attention over more keys than ``k`` has.
    """
    return _gradients(grad_out, saved, *rows_of_pieces(pieces))


KERNELS: Mapping[str, Kernel] = {
    "causal_attention": flash_attention,
    "causal_attention_backward": flash_attention_backward,
    "prefixed_attention": flash_attention_of_pieces,
    "prefixed_attention_backward": flash_attention_of_pieces_backward,
}


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequence[Pair],
    keys: Sequence[Pair],
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of each sequence of queries over its keys.

    The last rows of a sequence's keys are at the positions of its queries.
    """
    if queries and _is_fused(q):
        if window is None and queries == keys and (pad := padding(tuple(queries), q, v)):
            return padded_attention(q, k, v, pad)
        asking, seen = PackedRows.of(tuple(queries), q.device), PackedRows.of(tuple(keys), q.device)
        inputs = q[asking.rows], k[seen.rows], as_wide(v, q)[seen.rows]
        # With fewer queries than keys, the kernel aligns the causal mask at the last query and the last key.
        out, lse, *_ = _forward(*inputs, *_lengths(asking, seen), 0.0, True, False, **_sides(window))
        return asking.spread(out[..., : v.shape[-1]], len(q)), asking.spread(lse.T, len(q))
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, read in _slices(queries, keys):
        out[rows], lse[rows] = dense_attention.dense_forward(q[rows], k[read], v[read], window)
    return out, lse


def _gradients(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    queries: Sequence[Pair],
    keys: Sequence[Pair],
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of ``_attend``.

    The gradients of a key that belongs to several sequences are summed.
    """
    q, k, v, out, lse = saved
    if queries and _is_fused(q):
        if window is None and queries == keys and (pad := padding(tuple(queries), q, v)):
            return padded_attention_backward(grad_out, saved, pad)
        asking, seen = PackedRows.of(tuple(queries), q.device), PackedRows.of(tuple(keys), q.device)
        grad_out, wide_v, out = (as_wide(tensor, q) for tensor in (grad_out, v, out))
        inputs = (grad_out[asking.rows], q[asking.rows], k[seen.rows], wide_v[seen.rows], out[asking.rows])
        dq, dk, dv = _backward(
            *inputs,
            lse[asking.rows].T.contiguous(),
            *_lengths(asking, seen),
            0.0,
            True,
            *_no_dropout(q.device),
            **_sides(window),
        )
        dv = dv[..., : v.shape[-1]]
        return asking.spread(dq, len(q)), seen.spread(dk, len(k)), seen.spread(dv, len(v))
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, read in _slices(queries, keys):
        parts = dense_attention.dense_backward(
            grad_out[rows], (q[rows], k[read], v[read], out[rows], lse[rows]), window
        )
        for grad, place, part in zip(grads, (rows, read, read), parts, strict=True):
            grad[place] += part
    return grads


def _sides(window: int | None) -> dict[str, int]:
    """Return the numbers of rows to which flash attention limits a row, before and after it."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _slices(queries: Sequence[Pair], keys: Sequence[Pair]) -> Iterator[tuple[slice, slice]]:
    for rows, read in zip(queries, keys, strict=True):
        yield slice(*rows), slice(*read)


def _is_fused(q: Tensor) -> bool:
    width = q.shape[-1]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and width <= MAX_HEAD_DIM
        and width % HEAD_DIM_MULTIPLE == 0
    )


def _lengths(queries: PackedRows, keys: PackedRows) -> tuple[Tensor, Tensor, int, int]:
    return queries.starts, keys.starts, queries.longest, keys.longest


@lru_cache(maxsize=1)
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random state for dropout, which the operator requires even without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
