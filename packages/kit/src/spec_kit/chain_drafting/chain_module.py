"""ChainModule is the base class of the module of a chain draft: it has the head, whose vocabulary may be reduced."""

from __future__ import annotations

from typing import Any

from spec_core import VocabularyOps
from spec_kit.chain_drafting.chain_shape import ChainConfig, ChainShape
from spec_kit.drafting.vocabulary_module import VocabularyModule
from spec_kit.layers import DecoderKernels, linear


class ChainModule(VocabularyModule):
    """A draft's module with a head of its own."""

    shape: ChainShape
    config: ChainConfig
    kernels: DecoderKernels

    def add_head(self, shape: ChainShape) -> None:
        """Create the head; the vocabulary mapping is all zeros until it is loaded."""
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        self.add_vocabulary(shape)

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
