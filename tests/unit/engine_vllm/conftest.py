"""Fixtures of the tests of a vLLM whose ranks answer as a test says."""

from typing import Any

import pytest
from tests.unit.engine_vllm.played_ranks import COUNTED

from spec_core.records import AcceptanceCounters
from spec_engine_vllm import acceptance_counts, draft_routes
from spec_engine_vllm.acceptance_counts import EngineTotals


@pytest.fixture
def counted(monkeypatch) -> dict[str, Any]:
    counted = dict(COUNTED)

    def counters() -> AcceptanceCounters:
        positions = tuple(counted["accepted_per_position"])
        return AcceptanceCounters(**{**counted, "accepted_per_position": positions})

    monkeypatch.setattr(acceptance_counts, "speculation_counters", counters)
    monkeypatch.setattr(draft_routes, "rounds_of", lambda llm: EngineTotals())
    return counted
