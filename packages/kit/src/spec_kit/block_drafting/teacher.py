"""Compute the target's distributions for the guesses of blocks.

Shapes: R guesses, U distinct tokens before them.
"""

from __future__ import annotations

from spec_core import VocabularyOps
from spec_core.records import DraftBatch
from spec_kit.block_drafting.blocks import CountedGuesses
from spec_kit.block_drafting.head import BlockHead
from spec_kit.layers import DecoderKernels, Teacher, teach


def teacher_of_guesses(
    guesses: CountedGuesses, batch: DraftBatch, head: BlockHead, ops: VocabularyOps, kernels: DecoderKernels
) -> Teacher:
    """Return the target's distribution for each guess, computed once for each token before a guess.

    The batch's last captured state is the input of the target's final norm.
    """
    token_U, index_R = guesses.tokens_before()
    hidden_UH = batch.hidden_TNH[:, -1].index_select(0, token_U)
    return teach(ops, kernels, hidden_UH, head.ids_V, head.vocab_mask_V).take(index_R)
