"""Compute causal attention by matrix multiplications, for dtypes without a fused kernel.

It processes a few queries at a time. Shapes: L tokens of one document, Q queries of its last Q tokens, C
queries of a chunk, h heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCORE_BYTES = 1 << 28
"""Bytes of one chunk's scores: large enough to keep the GPU busy, and small compared with a model."""


def dense_forward(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the attention within one document, [Q, heads, width of ``v``], and its log-sum-exp [Q, heads].

    ``q`` has the shape [Q, heads, d]; ``k`` has the shape [L, kv_heads, d]. ``v`` may be narrower. ``window``: number
    of keys to which a query attends, up to its own.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=q.dtype, device=q.device)
    for rows, seen, score_hCL in _scores(q, k, window):
        lse[rows] = score_hCL.logsumexp(-1).T
        _, values = _by_head(q[rows], v[seen])
        out[rows] = (score_hCL.softmax(-1) @ values).transpose(0, 1)
    return out, lse


def dense_backward(
    grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse); lse is the log-sum-exp.

    ``out`` and ``lse`` may belong to attention over more keys than ``k`` has.
    """
    q, k, v, out, lse = saved
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, seen, score_hCL in _scores(q, k, window):
        queries, keys = _by_head(q[rows], k[seen])
        grads, values = _by_head(grad_out[rows], v[seen])
        probability_hCL = (score_hCL - lse[rows].T[..., None]).exp()
        drift_hC1 = (grad_out[rows] * out[rows]).sum(-1).T[..., None]
        dscore_hCL = probability_hCL * (grads @ values.mT - drift_hC1) * q.shape[-1] ** -0.5
        dq[rows] = (dscore_hCL @ keys).transpose(0, 1)
        dk[seen] += _per_kv_head(dscore_hCL.mT @ queries, k.shape[1])
        dv[seen] += _per_kv_head(probability_hCL.mT @ grads, k.shape[1])
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, window: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield for each chunk its queries, the keys that they see, and their masked scores [h, C, L']."""
    length, heads, width = q.shape
    before = len(k) - length
    chunk = max(1, SCORE_BYTES // max(1, heads * len(k) * q.element_size()))
    for start in range(0, length, chunk):
        rows = slice(start, min(start + chunk, length))
        low = 0 if window is None else max(0, before + start - window + 1)
        seen = slice(low, before + rows.stop)
        queries, keys = _by_head(q[rows], k[seen])
        key_L = torch.arange(low, seen.stop, device=q.device)
        distance_CL = torch.arange(before + start, seen.stop, device=q.device)[:, None] - key_L
        hidden_CL = distance_CL < 0 if window is None else (distance_CL < 0) | (distance_CL >= window)
        score_hCL = queries @ keys.mT * width**-0.5
        yield rows, seen, score_hCL.masked_fill(hidden_CL, float("-inf"))


def _by_head(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries [h, C, d] and keys [h, L', d]; each query head gets a copy of its key head."""
    groups = queries.shape[1] // keys.shape[1]
    return queries.transpose(0, 1), keys.repeat_interleave(groups, dim=1).transpose(0, 1)


def _per_kv_head(grad_hLd: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of the query heads that share a key-value head: [L, kv_heads, d]."""
    heads, length, width = grad_hLd.shape
    return grad_hLd.view(kv_heads, heads // kv_heads, length, width).sum(1).transpose(0, 1)
