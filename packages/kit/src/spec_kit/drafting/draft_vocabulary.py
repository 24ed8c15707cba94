"""The draft's vocabulary: which target tokens have a row in its head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spec_core.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_kit.drafting.served_draft import DraftCheckpoint

MAPPING = ("d2t", "t2d")
"""Names of the buffers."""


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


def read_mapping(checkpoint: DraftCheckpoint[Any]) -> dict[str, Tensor]:
    """Return the buffers of a folder, checked: ArtifactError where they are no mapping."""
    shape, where = checkpoint.shape, f"draft {checkpoint.folder}"
    stored = checkpoint.load(*(name for name in MAPPING if name in checkpoint.stored_names))
    ids_V = torch.arange(shape.vocab_size) + stored["d2t"].long()
    total = shape.target_vocab_size
    if ids_V.min() < 0 or ids_V.max() >= total:
        raise ArtifactError(
            f"{where}: d2t maps rows to ids {int(ids_V.min())} to {int(ids_V.max())}, the target's vocabulary has "
            f"0 to {total - 1}"
        )
    if not bool((ids_V.diff() > 0).all()):
        raise ArtifactError(f"{where}: d2t does not map its rows to strictly ascending ids")
    if not shape.reduced and stored["d2t"].any():
        raise ArtifactError(f"{where}: d2t permutes a full vocabulary; it must be 0 or absent")
    expected = mapping(ids_V, total)
    if "t2d" in stored and not torch.equal(stored["t2d"].bool(), expected["t2d"]):
        raise ArtifactError(f"{where}: t2d and d2t do not describe the same vocabulary")
    return expected
