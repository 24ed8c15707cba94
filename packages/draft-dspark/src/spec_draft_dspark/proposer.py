"""Draft with DSpark in plain torch, as a reference: a block's guesses are made one after the other.

One pass before computes the states of all slots of a block. Shape suffixes: B sequences, K guesses, H width,
V rows of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator

from spec_core import Proposal
from spec_draft_dspark.model import DSparkModel
from spec_kit.block_drafting import BlockProposer
from spec_kit.drafting import Guesses


class DSparkProposer(BlockProposer):
    """Guesses one token with each slot; the previous guess biases the logits of the next guess.

    To guess K tokens, vLLM and SGLang run a block of K slots, or of K + 1 if the first makes no guess. Such a block
    may be shorter than those of training. This proposer does the same.
    """

    module: DSparkModel

    @classmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Return each sequence's guesses, with the biased distributions from which they are drawn."""
        module = proposers[0].module
        head, shape = module.markov_head, module.shape
        num_slots = num_tokens + shape.block_size - shape.num_guesses
        states_BKH = cls.states(proposers, num_slots)[:, -num_tokens:]
        head_VH, tokens = cls.choose_from(proposers)
        base_BKV = states_BKH @ head_VH.T
        guesses = Guesses(num_tokens, temperature, generators)
        memory = None
        token_B = torch.tensor([p.last_id for p in proposers], device=states_BKH.device)
        for k in range(num_tokens):
            bias_Br, memory = head.step(states_BKH[:, k], head.embed(token_B), memory)
            logits_BV = base_BKV[:, k] + bias_Br @ head.markov_w2.weight.T
            token_B = guesses.choose(logits_BV, tokens)
        return guesses.proposals()
