"""Attention with an explicit mask, with which the kernels of a backend are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[tuple[int, int]], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [T, heads, head_dim] and log-sum-exp [T, heads] of attention with an explicit mask.

    Rows outside every document are 0. ``window``: number of rows to which a row attends, itself included.
    """
    document_T = torch.zeros(len(q), dtype=torch.int64)
    for index, (start, stop) in enumerate(bounds, start=1):
        document_T[start:stop] = index
    seen_TT = torch.ones(len(q), len(q)).tril().bool() & (document_T[:, None] == document_T)
    if window is not None:
        seen_TT = seen_TT.triu(1 - window)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    score_hTT = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    score_hTT = score_hTT.masked_fill(~seen_TT, float("-inf"))
    real_T11 = (document_T > 0)[:, None, None]
    out = torch.einsum("hqk,khd->qhd", score_hTT.softmax(-1), v).where(real_T11, 0)
    return out, score_hTT.logsumexp(-1).T
