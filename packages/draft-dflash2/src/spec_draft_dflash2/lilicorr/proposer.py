"""Draft with LiLiCorr in plain torch, as a reference: a path through a block's candidates, one step after the other.

The states of a block's slots and the scores of all steps are computed at once. Shape suffixes: B sequences, K
guesses, C candidates of each, H width, N captured layers, T new positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator, Tensor

from spec_core import Proposal, VocabularyOps
from spec_draft_dflash2.candidates import Candidates, over_vocabulary
from spec_draft_dflash2.lilicorr.model import LiLiCorrModel
from spec_kit.block_drafting import BlockProposer
from spec_kit.drafting import Guesses


class LiLiCorrProposer(BlockProposer):
    """Guesses one token with each slot after the first; the scores depend on the candidate before.

    To guess K tokens, vLLM and SGLang run a block of K + 1 slots, even if K + 1 is below the block size of training.
    This proposer does the same.
    """

    module: LiLiCorrModel

    def __init__(self, module: LiLiCorrModel, ops: VocabularyOps, num_guesses: int) -> None:
        """Start with an empty context."""
        super().__init__(module, ops, num_guesses)
        self.anchor_H: Tensor | None = None
        """The context at the last position; None if there is no position."""

    @classmethod
    @torch.no_grad()
    def extend_all(  # pyright: ignore[reportIncompatibleMethodOverride] (Self is narrower)
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Extend every sequence's KV cache by more positions, and keep the context at its last position."""
        super().extend_all(proposers, next_ids, hidden)
        module = proposers[0].module
        last_BNH = torch.stack([hidden_TNH[-1] for hidden_TNH in hidden]).to(module.fc.weight.device)
        for proposer, anchor_H in zip(proposers, module.context(last_BNH), strict=True):
            proposer.anchor_H = anchor_H

    @classmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Return each sequence's guesses, with the vocabulary-wide distributions from which they are drawn."""
        first = proposers[0]
        module = first.module
        head_VH, _ = cls.choose_from(proposers)
        states_BKH = cls.states(proposers, num_tokens + 1)[:, 1:]
        logits_BKV = states_BKH @ head_VH.T
        found = Candidates.of(logits_BKV.flatten(0, 1), module.ids_V, first.ops, module.shape)
        id_BKC, top_BKC = (t.unflatten(0, logits_BKV.shape[:2]) for t in (found.id_RC, found.logits_RC))
        log_prob_BKC = top_BKC - logits_BKV.to(top_BKC).logsumexp(-1, keepdim=True)
        zero_H = states_BKH.new_zeros(states_BKH.shape[-1])
        anchors = [proposer.anchor_H for proposer in proposers]
        anchor_BH = torch.stack([zero_H if anchor_H is None else anchor_H for anchor_H in anchors])
        has_anchor_B = torch.tensor([anchor_H is not None for anchor_H in anchors], device=anchor_BH.device)
        score_BC, step_BKCC = module.lilicorr(
            first.ops.embed(id_BKC), log_prob_BKC, states_BKH, anchor_BH, has_anchor_B
        )
        guesses = Guesses(num_tokens, temperature, generators)
        each = torch.arange(len(proposers))
        for k in range(num_tokens):
            id_BC = id_BKC[:, k]
            if temperature == 0:
                token_B = guesses.add(id_BC[each, score_BC.argmax(-1)], None)
            else:
                probs_BV = over_vocabulary((score_BC / temperature).softmax(-1), id_BC, logits_BKV.shape[-1])
                token_B = guesses.add(guesses.draw(probs_BV), probs_BV)
            if k + 1 < num_tokens:
                score_BC = step_BKCC[each, k, (id_BC == token_B[:, None]).long().argmax(-1)]
        return guesses.proposals()
