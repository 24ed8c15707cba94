"""Compute the attention of several sequences' new positions to their KV caches (reference drafting).

Shapes: T new positions of all sequences, one sequence after the other; L positions of one sequence; N heads; D
channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Cache = tuple[Tensor, Tensor]
"""Keys and values of one sequence in one layer, [L, N, D]."""


def new_positions(caches: Sequence[Cache], counts: Sequence[int]) -> Tensor:
    """Return the positions, int64 [T], of the ``counts[i]`` tokens that follow each cache i."""
    pieces = [
        torch.arange(len(keys), len(keys) + count, device=keys.device)
        for (keys, _), count in zip(caches, counts, strict=True)
    ]
    return torch.cat(pieces)


def extended_caches(
    caches: Sequence[Cache], k_TND: Tensor, v_TND: Tensor, counts: Sequence[int]
) -> list[Cache]:
    """Return the caches with the keys and values of ``counts[i]`` more positions for cache i."""
    new = zip(k_TND.split(list(counts)), v_TND.split(list(counts)), strict=True)
    return [
        (torch.cat([keys, k]), torch.cat([values, v]))
        for (keys, values), (k, v) in zip(caches, new, strict=True)
    ]


def cached_attention(
    q_TND: Tensor, caches: Sequence[Cache], counts: Sequence[int], window: int | None = None
) -> Tensor:
    """Return the causal attention [T, N, D] of queries at the last ``counts[i]`` positions of cache i.

    ``window``: the largest number of positions to which a query attends, its own included.
    """
    pieces: list[Tensor] = []
    for q, (keys, values), count in zip(q_TND.split(list(counts)), caches, counts, strict=True):
        visible = torch.ones(count, len(keys), dtype=torch.bool, device=q.device).tril(len(keys) - count)
        if window is not None:
            visible = visible.triu(len(keys) - count - window + 1)
        heads = (part.transpose(0, 1)[None] for part in (q, keys, values))
        attended = F.scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True)
        pieces.append(attended[0].transpose(0, 1))
    return torch.cat(pieces)
