"""Proposals are those of the training forward, one guess after the other, and engine ``hf`` decodes with them."""

import pytest

from spec_draft_dspark.draft import DSparkDraft

from ..block_proposals import DependentProposalSuite
from ..draft_decoding import DraftDecodingSuite
from . import cases


class TestDSparkProposals(DependentProposalSuite):
    cases = cases
    first_guess = 0

    @pytest.fixture(
        params=[("vanilla", None), ("gated", None), ("rnn", None), ("vanilla", 11), ("rnn", 11)], ids=str
    )
    def options(self, request):
        head, vocab_size = request.param
        return {"markov_head": head, "vocab_size": vocab_size}

    def scores(self, module, ops, states_KH, before_K):
        inputs = module.head_inputs(states_KH[None], before_K[None])
        return super().scores(module, ops, states_KH, before_K) + inputs.bias_ASr[0] @ inputs.bias_Vr.T


class TestProposalsWithoutTheFirstSlot(TestDSparkProposals):
    first_guess = 1

    @pytest.fixture
    def options(self):
        return {"markov_head": "rnn", "sample_from_anchor": False}


def of_head(head):
    return DSparkDraft(cases.make_config(block_size=3, markov_head=head, layers=(1,)))


class TestDSparkDecoding(DraftDecodingSuite):
    @pytest.fixture(params=["vanilla", "gated", "rnn"])
    def draft(self, request):
        return of_head(request.param)

    @pytest.fixture
    def sampled(self):
        """Other heads draw in the same way; the suite above compares the probabilities of each with the forward
        pass."""
        return of_head("rnn")
