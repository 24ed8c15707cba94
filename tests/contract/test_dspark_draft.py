"""DSpark keeps the contract of drafts, with every kind of head."""

import pytest

from spec_core import Draft
from spec_draft_dspark.draft import DSparkDraft
from spec_testing import DraftSuite

GATED = {"markov_head": "gated", "confidence_with_markov": False}


class TestDSparkDraft(DraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return DSparkDraft

    @pytest.fixture(
        params=[{}, GATED, {"markov_head": "rnn", "confidence": False}], ids=["vanilla", "gated", "rnn"]
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Blocks of as many guesses as the suite drafts."""
        return {"block_size": 3, "num_layers": 2, "markov_rank": 8, **request.param}

    def supervised(self, last_known: int, position: int) -> list[int]:
        """A block counts its guesses up to the first unsupervised token, so only the one that starts at
        ``last_known`` reaches ``position``."""
        return list(range(last_known, last_known + position + 2))
