"""Acceptance counters, from rounds one by one and from many alike."""

from __future__ import annotations

from spec_core.hosting.tally import Tally
from spec_core.records import AcceptanceCounters


def test_counters_are_of_rounds_and_positions() -> None:
    tally = Tally()
    tally.add(3, 0, rounds=5)
    tally.add(3, 1)
    tally.add(3, 1)
    tally.add(3, 2)
    tally.add(3, 3, rounds=0)  # an answer of one token needs no round
    assert tally.counters() == AcceptanceCounters(
        rounds=8, drafted=24, accepted=4, accepted_per_position=(3, 1, 0)
    )


def test_rounds_of_fewer_tokens_count_where_they_reach() -> None:
    tally = Tally()
    tally.add(1, 1)
    tally.add(3, 2)
    tally.add(0, 0)  # a round without a guess
    assert tally.counters() == AcceptanceCounters(
        rounds=3, drafted=4, accepted=3, accepted_per_position=(2, 1, 0)
    )
