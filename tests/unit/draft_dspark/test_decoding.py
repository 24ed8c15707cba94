"""Engine ``hf`` gives the target's own text with this draft, greedy and sampled."""

import pytest

from spec_draft_dspark.draft import DSparkDraft

from ..draft_decoding import DraftDecodingSuite
from .cases import make_config


def of_head(head):
    return DSparkDraft(make_config(block_size=3, markov_head=head, layers=(1,)))


class TestDSparkDecoding(DraftDecodingSuite):
    @pytest.fixture(params=["vanilla", "gated", "rnn"])
    def draft(self, request):
        return of_head(request.param)

    @pytest.fixture
    def sampled(self):
        """Other heads draw in the same way; ``test_proposer`` compares the probabilities of each with the forward
        pass."""
        return of_head("rnn")
