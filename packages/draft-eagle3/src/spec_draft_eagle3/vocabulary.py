"""The draft's vocabulary: which target tokens have a row in its head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def select_tokens(token_counts: Tensor | None, target_size: int, size: int, always: Sequence[int]) -> Tensor:
    """Return int64 [size], ascending: ``always``, then the most frequent tokens, ties to the smaller id.

    ``token_counts`` int64 [target_size] says how often each token is supervised; None counts as all equal.
    """
    counts = (
        torch.zeros(target_size, dtype=torch.int64) if token_counts is None else token_counts.cpu().clone()
    )
    counts[[token for token in always if token < target_size]] = torch.iinfo(torch.int64).max
    by_frequency = counts.argsort(descending=True, stable=True)
    return by_frequency[:size].sort().values


def mapping(ids_V: Tensor, target_size: int) -> dict[str, Tensor]:
    """Return the buffers of the served format: ``d2t[row] = id − row`` and the set of kept ids ``t2d``."""
    kept = torch.zeros(target_size, dtype=torch.bool, device=ids_V.device)
    kept[ids_V] = True
    return {"d2t": ids_V - torch.arange(len(ids_V), device=ids_V.device), "t2d": kept}
