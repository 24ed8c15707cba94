"""P-EAGLE keeps the contract of drafts, in one segment and in several, with a whole and a reduced vocabulary."""

import pytest

from spec_core import Draft
from spec_draft_peagle.draft import PEagleDraft
from spec_testing import DraftSuite


class TestPEagleDraft(DraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return PEagleDraft

    @pytest.fixture(params=[{}, {"segment_tokens": 5, "vocab_size": 40}], ids=["whole", "segments"])
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Chains of as many guesses as the suite drafts, none of which is dropped."""
        return {"num_guesses": 3, "num_layers": 2, "retention": 1.0, **request.param}

    def supervised(self, last_known: int, position: int) -> list[int]:
        """A chain counts its guesses up to the first unsupervised token, so only the one that starts at
        ``last_known`` reaches ``position``."""
        return list(range(last_known + 1, last_known + position + 2))
