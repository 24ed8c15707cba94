"""A block of proposals is what the training forward says at the same place, with blocks as long as those drafted."""

import pytest

from ..block_proposals import BlockProposalSuite
from . import cases

LAYERS = {
    "full": {"num_layers": 2},
    "sliding": {"num_layers": 2, "sliding_window": 5},
    "reduced": {"num_layers": 2, "vocab_size": 11},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
}


class TestDFlashProposals(BlockProposalSuite):
    cases = cases

    @pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
    def options(self, request):
        return request.param
