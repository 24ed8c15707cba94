"""Proposals are those of the training forward, one guess after the other, and engine ``hf`` decodes with them."""

import pytest
import torch

from spec_draft_dflash2.convolution import BlockConvolution
from spec_draft_dflash2.draft import DFlash2Draft
from spec_kit.block_drafting import Blocks

from ..block_proposals import DependentProposalSuite
from ..draft_batches import make_batch, random_documents
from ..draft_decoding import DraftDecodingSuite
from ..draft_parts import make_ops, make_target, make_tensors
from . import cases
from .cases import make_config


class TestDFlash2Proposals(DependentProposalSuite):
    cases = cases
    longest = 3

    @pytest.fixture(params=[{}, {"sliding_window": 4}], ids=str)
    def options(self, request):
        return request.param

    def scores(self, module, ops, states_KH, before_K):
        """Scores [K, V] of the head and the selector; tokens that are no candidates have -inf."""
        logits_KV, selector = super().scores(module, ops, states_KH, before_K), module.candidate_selector
        score_KV = logits_KV + selector.context(states_KH, before_K) @ selector.successor_codebook.T
        last_K1 = logits_KV.sort(-1, descending=True).values[:, module.shape.selector_top_k - 1, None]
        return score_KV.masked_fill(logits_KV < last_K1, -torch.inf)


def test_a_fresh_drafts_layers_are_dflashs(monkeypatch):
    """The convolutions start as the identity: without them the states are the same."""
    target, config = make_target(), make_config()
    torch.manual_seed(0)
    module = DFlash2Draft(config).build(target, make_tensors(target), None)
    (document,) = random_documents(target, [12], 4, 6)
    blocks = Blocks(*torch.tensor([[9], [0], [1]]))
    arguments = make_batch([document], [0]), blocks, make_ops(target)
    states = module.states(*arguments)
    monkeypatch.setattr(BlockConvolution, "forward", lambda _, x, sublayer: sublayer(x))
    torch.testing.assert_close(module.states(*arguments), states, rtol=1e-6, atol=1e-6)


class TestDFlash2Decoding(DraftDecodingSuite):
    @pytest.fixture
    def draft(self):
        return DFlash2Draft(make_config(block_size=4, layers=(1,), selector_top_k=3))

    @pytest.fixture
    def sampled(self, draft):
        return draft
