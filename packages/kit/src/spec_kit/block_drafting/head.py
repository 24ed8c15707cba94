"""BlockHead is the head by which a block draft guesses: the target's head, or some of its rows.

Shapes: R guesses, V the rows of the head on this shard of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from spec_core import LinearWeight, VocabularyOps
from spec_kit.drafting.vocabulary_module import VocabularyModule


@dataclass(frozen=True)
class BlockHead:
    """The head by which a block draft guesses, without a gradient."""

    products: LinearWeight
    ids_V: Tensor
    """int64, ascending: token id of each row."""
    vocab_mask_V: Tensor | None = None
    """bool over the target's whole vocabulary: whether the token has a row; None if all have one."""

    @classmethod
    def of(cls, ops: VocabularyOps, module: VocabularyModule) -> Self:
        """Return the rows of the target's head that are in the vocabulary of ``module``."""
        if module.t2d is None:
            return cls(ops.head, torch.arange(*ops.vocab_range, device=ops.head_VH.device))
        ids_V = module.local_ids(ops)
        return cls(ops.head.take(ids_V - ops.vocab_range[0]), ids_V, module.t2d)

    def has(self, id_R: Tensor) -> Tensor:
        """Return whether each token has a row, bool [R]."""
        if self.vocab_mask_V is None:
            return torch.ones_like(id_R, dtype=torch.bool)
        return self.vocab_mask_V[id_R]
