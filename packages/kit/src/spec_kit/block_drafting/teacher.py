"""Compute the target's distributions for the guesses of blocks.

Shapes: R guesses, U distinct tokens before them, V the local rows of the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_kit.layers import sharded_logsumexp_argmax

if TYPE_CHECKING:
    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch
    from spec_kit.block_drafting.blocks import CountedGuesses
    from spec_kit.layers import DecoderKernels, Distribution


def teacher_of_guesses(
    guesses: CountedGuesses, batch: DraftBatch, ops: VocabularyOps, kernels: DecoderKernels
) -> Distribution:
    """Return the target's distribution for each guess, computed once for each token before a guess.

    The batch's last captured state is the input of the target's final norm.
    """
    token_U, index_R = guesses.tokens_before()
    logits_UV = ops.teacher_logits(batch.hidden_TNH[:, -1].index_select(0, token_U))
    ids_V = torch.arange(*ops.vocab_range, device=token_U.device)
    log_sum_U, _ = sharded_logsumexp_argmax(logits_UV, ids_V, ops, kernels)
    return logits_UV.index_select(0, index_R), log_sum_U[index_R]
