"""ChainModule is the base class of the module of a chain draft: it has the head, whose vocabulary may be reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spec_kit.layers import linear

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_kit.chain_drafting.chain_shape import ChainConfig, ChainShape
    from spec_kit.layers import DecoderKernels


class ChainModule(nn.Module):
    """A draft's module with a head of its own.

    A module with a reduced vocabulary has two buffers. ``d2t``, int64 with an element for each row of the head: the
    token id of row r is r + d2t[r]. ``t2d``, bool with an element for each token id: whether the head has a row for
    it.
    """

    shape: ChainShape
    config: ChainConfig
    kernels: DecoderKernels
    d2t: Tensor | None
    t2d: Tensor | None

    def add_head(self, shape: ChainShape) -> None:
        """Create the head; the vocabulary mapping is all zeros until it is loaded."""
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        sizes = {"d2t": (shape.vocab_size, torch.int64), "t2d": (shape.target_vocab_size, torch.bool)}
        for name, (size, dtype) in sizes.items():
            self.register_buffer(name, torch.zeros(size, dtype=dtype) if shape.reduced else None)

    @property
    def ids_V(self) -> Tensor:
        """Token id of each row of the head, int64 [V']."""
        rows = torch.arange(self.shape.vocab_size, device=self.lm_head.weight.device)
        return rows if self.d2t is None else rows + self.d2t

    @property
    def head_tokens(self) -> tuple[Tensor, int] | None:
        """``ids_V`` and the size of the target's vocabulary; None if the vocabulary is not reduced."""
        return None if self.d2t is None else (self.ids_V, self.shape.target_vocab_size)

    def local_ids(self, ops: VocabularyOps) -> Tensor:
        """Return the token ids of this rank's rows of the head; the ids lie in ``ops.vocab_range``."""
        ids_V, (first, stop) = self.ids_V, ops.vocab_range
        if stop - first == self.shape.target_vocab_size:
            return ids_V
        rows = torch.arange(len(self.lm_head.weight), device=ids_V.device)
        return ids_V[(ids_V < first).sum() + rows]

    def head_parts(self, ops: VocabularyOps) -> dict[str, Any]:
        """Return what the loss of guesses needs to know of the head: the fields of ``HeadLoss``."""
        return {
            "head": self.kernels.linear_weight(self.lm_head.weight),
            "ids_V": self.local_ids(ops),
            "vocab_mask_V": self.t2d,
            "kind": self.config.loss,
            "ops": ops,
            "kernels": self.kernels,
        }
