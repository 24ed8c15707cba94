"""Compute the target's distributions for the guesses of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_kit.drafting import teach

if TYPE_CHECKING:
    from spec_core.ops import VocabularyOps
    from spec_core.records import DraftBatch
    from spec_kit.block_drafting.blocks import CountedGuesses
    from spec_kit.drafting import DecoderKernels, Teacher


def teacher_of_guesses(
    guesses: CountedGuesses, batch: DraftBatch, ops: VocabularyOps, kernels: DecoderKernels
) -> Teacher:
    """Return the target's distribution for each guess, computed once for each token before a guess.

    The batch's last captured state is the input of the target's final norm.
    """
    token_U, index_R = guesses.tokens_before()
    ids_V = torch.arange(*ops.vocab_range, device=token_U.device)
    return teach(ops, kernels, batch.hidden_TNH[token_U, -1], ids_V, None).take(index_R)
