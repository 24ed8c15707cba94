"""Draft with DFlash in plain torch, as a reference: all guesses of a block are made at once.

Shape suffixes: B sequences, K guesses, V rows of the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from spec_kit.block_drafting import BlockProposer
from spec_kit.drafting import Guesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator

    from spec_core import Proposal


class DFlashProposer(BlockProposer):
    """Guesses one token with each slot after the first, which holds the last known token.

    To guess K tokens, vLLM and SGLang run a block of K + 1 slots, even if K + 1 is below the block size of training.
    This proposer does the same.
    """

    @classmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Return the guesses of each sequence, drawn independently of one another."""
        head_VH, tokens = cls.choose_from(proposers)
        logits_BKV = cls.states(proposers, num_tokens + 1)[:, 1:] @ head_VH.T
        guesses = Guesses(num_tokens, temperature, generators)
        for k in range(num_tokens):
            guesses.choose(logits_BKV[:, k], tokens)
        return guesses.proposals()
