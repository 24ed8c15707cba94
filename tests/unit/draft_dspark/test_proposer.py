"""Proposals are those of the training forward over the tokens that were drawn, one guess after the other."""

import pytest

from ..block_proposals import DependentProposalSuite
from . import cases


class TestDSparkProposals(DependentProposalSuite):
    cases = cases
    first_guess = 0

    @pytest.fixture(params=["vanilla", "gated", "rnn"])
    def options(self, request):
        return {"markov_head": request.param}

    def scores(self, module, ops, states_KH, before_K):
        inputs = module.head_inputs(states_KH[None], before_K[None])
        return super().scores(module, ops, states_KH, before_K) + inputs.bias_ASr[0] @ inputs.bias_Vr.T
