"""VocabularyModule is the base class of a draft's module whose vocabulary may be reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spec_core import TargetSpec, VocabularyOps
from spec_kit.drafting.draft_vocabulary import mapping, select_tokens
from spec_kit.drafting.vocabulary_shape import VocabularyShape


class VocabularyModule(nn.Module):
    """A draft's module that knows the token of each row of its head.

    A module with a reduced vocabulary has two buffers. ``d2t``, int64 with an element for each row of the head: the
    token id of row r is r + d2t[r]. ``t2d``, bool with an element for each token id: whether the head has a row for
    it.
    """

    shape: Any  # a VocabularyShape; subclasses name their own kind of it
    d2t: Tensor | None
    t2d: Tensor | None

    def add_vocabulary(self, shape: VocabularyShape) -> None:
        """Create the buffers of a reduced vocabulary, which are all zeros until they are loaded."""
        sizes = {"d2t": (shape.vocab_size, torch.int64), "t2d": (shape.target_vocab_size, torch.bool)}
        for name, (size, dtype) in sizes.items():
            self.register_buffer(name, torch.zeros(size, dtype=dtype) if shape.reduced else None)

    def choose_vocabulary(self, target: TargetSpec, token_counts: Tensor | None) -> Tensor:
        """Choose the target's end tokens and most frequent tokens for a reduced vocabulary; return ``ids_V``."""
        if self.shape.reduced:
            total = target.vocab_size
            ids_V = select_tokens(token_counts, total, self.shape.vocab_size, target.eos_token_ids)
            self.load_state_dict(mapping(ids_V, total), strict=False)
        return self.ids_V

    @property
    def ids_V(self) -> Tensor:
        """Token id of each row of the head, int64 [V']."""
        rows = torch.arange(self.shape.vocab_size, device=next(self.parameters()).device)
        return rows if self.d2t is None else rows + self.d2t

    @property
    def head_tokens(self) -> tuple[Tensor, int] | None:
        """``ids_V`` and the size of the target's vocabulary; None if the vocabulary is not reduced."""
        return None if self.d2t is None else (self.ids_V, self.shape.target_vocab_size)

    def local_ids(self, ops: VocabularyOps) -> Tensor:
        """Return the token ids of this rank's rows of the head; the ids lie in ``ops.vocab_range``."""
        ids_V = self.ids_V
        first, stop = ops.vocab_range
        if stop - first == self.shape.target_vocab_size:
            return ids_V
        return ids_V[(ids_V >= first) & (ids_V < stop)]
