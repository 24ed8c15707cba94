"""DFlash keeps the contract of drafts, with every kind of layer and every loss."""

import pytest

from spec_core import Draft
from spec_draft_dflash.draft import DFlashDraft
from spec_testing import DraftSuite

MIXED = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 4, "loss": "soft"}


class TestDFlashDraft(DraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return DFlashDraft

    @pytest.fixture(
        params=[{}, {"num_layers": 1, "sliding_window": 4, "loss": "dpace"}, MIXED],
        ids=["full", "sliding", "mixed"],
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Blocks as long as what the suite drafts: engines run a block of the guesses and the last known token."""
        return {"block_size": 4, "num_layers": 2, **request.param}

    def supervised(self, last_known: int, position: int) -> list[int]:
        """A block counts its slots up to the first unsupervised token, so only the one that starts at ``last_known``
        reaches ``position``."""
        return list(range(last_known, last_known + position + 2))
