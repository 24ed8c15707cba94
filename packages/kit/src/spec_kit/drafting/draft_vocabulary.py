"""Choose and store the draft's vocabulary: the target tokens that have a row in the draft's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_core.errors import ArtifactError
from spec_kit.drafting.draft_checkpoint import DraftCheckpoint

MAPPING = ("d2t", "t2d")
"""Names of the buffers that store the draft's vocabulary."""


def select_tokens(token_counts: Tensor | None, target_size: int, size: int, always: Sequence[int]) -> Tensor:
    """Return the draft's vocabulary, int64 [size] ascending: ``always`` and the most frequent tokens.

    Of equally frequent tokens, smaller ids come first. ``token_counts``, int64 [target_size]: how often each
    token is supervised; None means all equally often.
    """
    counts = (
        torch.zeros(target_size, dtype=torch.int64) if token_counts is None else token_counts.cpu().clone()
    )
    counts[[token for token in always if token < target_size]] = torch.iinfo(torch.int64).max
    by_frequency = counts.argsort(descending=True, stable=True)
    return by_frequency[:size].sort().values


def mapping(ids_V: Tensor, target_size: int) -> dict[str, Tensor]:
    """Return the buffers of the vocabulary ``ids_V`` in the served format.

    ``d2t``: id − row for each row of the head. ``t2d``: bool [target_size], whether each id has a row.
    """
    kept = torch.zeros(target_size, dtype=torch.bool, device=ids_V.device)
    kept[ids_V] = True
    return {"d2t": ids_V - torch.arange(len(ids_V), device=ids_V.device), "t2d": kept}


def read_mapping(checkpoint: DraftCheckpoint[Any]) -> dict[str, Tensor]:
    """Read and check the buffers ``d2t`` and ``t2d`` of a checkpoint.

    Raises ArtifactError if they do not describe a vocabulary of the checkpoint's shape.
    """
    shape = checkpoint.shape
    where = f"draft {checkpoint.folder}"
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
