"""Draft with DFlash2 in plain torch, as a reference: a block's guesses are made one after the other.

The states of a block's slots are computed at once. Each guess is then chosen among its candidates. Shape
suffixes: B sequences, K guesses, C candidates of each, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator

from spec_core import Proposal
from spec_draft_dflash2.candidates import Candidates, over_vocabulary
from spec_draft_dflash2.model import DFlash2Model
from spec_draft_dflash2.selector import scores
from spec_kit.block_drafting import BlockProposer
from spec_kit.drafting import Guesses


class DFlash2Proposer(BlockProposer):
    """Guesses one token with each slot after the first; the selector reads the previous guess.

    To guess K tokens, vLLM and SGLang run a block of K + 1 slots, even if K + 1 is below the block size of training.
    This proposer does the same.
    """

    module: DFlash2Model

    @classmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Return each sequence's guesses, with the vocabulary-wide distributions from which they are drawn."""
        first = proposers[0]
        selector = first.module.candidate_selector
        head_VH, _ = cls.choose_from(proposers)
        states_BKH = cls.states(proposers, num_tokens + 1)[:, 1:]
        guesses = Guesses(num_tokens, temperature, generators)
        token_B = torch.tensor([p.last_id for p in proposers], device=states_BKH.device)
        for k in range(num_tokens):
            logits_BV = states_BKH[:, k] @ head_VH.T
            found = Candidates.of(logits_BV, first.module.ids_V, first.ops, first.module.shape)
            context_Br = selector.context(states_BKH[:, k], token_B)
            score_BC = scores(found.logits_RC, context_Br, selector.successor_codebook[found.id_RC])
            if temperature == 0:
                token_B = guesses.add(
                    found.id_RC.gather(1, score_BC.argmax(-1, keepdim=True)).squeeze(1), None
                )
            else:
                probs_BV = over_vocabulary(
                    (score_BC / temperature).softmax(-1), found.id_RC, first.module.shape.target_vocab_size
                )
                token_B = guesses.add(guesses.draw(probs_BV), probs_BV)
        return guesses.proposals()
