"""Engine ``hf`` gives the target's own text with this draft, greedy and sampled."""

import pytest

from spec_draft_dflash2.draft import DFlash2Draft

from ..draft_decoding import DraftDecodingSuite
from .cases import make_config


class TestDFlash2Decoding(DraftDecodingSuite):
    @pytest.fixture
    def draft(self):
        return DFlash2Draft(make_config(block_size=4, layers=(1,), selector_top_k=3))

    @pytest.fixture
    def sampled(self, draft):
        return draft
