"""DFlash2 keeps the contract of drafts."""

import pytest

from spec_core import Draft
from spec_draft_dflash2.draft import DFlash2Draft
from spec_testing import DraftSuite


class TestDFlash2Draft(DraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return DFlash2Draft

    @pytest.fixture(params=[{}, {"ce_weight": 1.0, "soft_weight": 0.0}], ids=["soft", "ce"])
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Blocks of as many guesses as the suite drafts."""
        sizes = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
        return {"block_size": 4, "num_layers": 2, **sizes, **request.param}

    def supervised(self, last_known: int, position: int) -> list[int]:
        """A block counts its guesses up to the first unsupervised token, so only the one that starts at
        ``last_known`` reaches ``position``."""
        return list(range(last_known, last_known + position + 2))
