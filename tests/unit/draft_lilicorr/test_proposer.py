"""Proposals are those of the training forward, one guess after the other, and engine ``hf`` decodes with them."""

import pytest
import torch

from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft

from ..block_proposals import KNOWN, DependentProposalSuite
from ..draft_batches import LLAMA3
from ..draft_decoding import DraftDecodingSuite
from ..draft_parts import make_target
from . import cases
from .cases import make_config
from .dense_reference import path_scores


class TestLiLiCorrProposals(DependentProposalSuite):
    cases = cases
    longest = 3

    @pytest.fixture(
        params=[{}, {"conv_kernel_size": 0, "conv_group_size": None, "lilicorr_logit_scale": 20.0}],
        ids=["conv", "plain"],
    )
    def options(self, request):
        return request.param

    def target(self):
        return make_target(rope=LLAMA3)

    def model(self, guesses, options):
        """A shorter block has the first slots' weights."""
        module = super().model(self.longest, options)
        module.shape = module.shape.model_copy(update={"block_size": guesses + 1})
        return module

    def forward_probs(self, options, document, guesses, temperature):
        self.document = document
        return super().forward_probs(options, document, guesses, temperature)

    def scores(self, module, ops, states_KH, before_K):
        """Scores [K, V] by the dense reference, step after step; tokens that are no candidates have -inf."""
        weights = {name: p.detach().double() for name, p in module.named_parameters()}
        setting, parts = cases.dense_terms(module, [self.document], self.target())
        states_KH = states_KH.detach().double()
        anchor_H = module.context(self.document.states[KNOWN - 2 : KNOWN - 1])[0].detach().double()
        logits_KV = states_KH @ setting.target_head.T
        chosen, score_C, steps = path_scores(weights, states_KH, logits_KV, anchor_H, setting, parts)
        score_KV = torch.full(logits_KV.shape, -torch.inf)
        for k, tokens in enumerate(chosen):
            if k:
                score_C = steps[k - 1][chosen[k - 1].index(int(before_K[k]))]
            score_KV[k, tokens] = score_C.float()
        return score_KV


class TestLiLiCorrDecoding(DraftDecodingSuite):
    @pytest.fixture
    def draft(self):
        return LiLiCorrDraft(make_config(block_size=4, layers=(1,)))

    @pytest.fixture
    def sampled(self, draft):
        return draft
