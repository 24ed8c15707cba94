"""Acceptance, added up from SGLang's own counters: ``spec_correct_drafts_histogram`` of each answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.records import AcceptanceCounters

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tally:
    def __init__(self) -> None:
        self._rounds = self._drafted = 0
        self._accepted_at: list[int] = []

    def add(self, histogram: Sequence[int], num_draft_tokens: int) -> None:
        """``histogram[n]``: verifications that accepted n draft tokens."""
        rounds = sum(histogram)
        self._rounds += rounds
        self._drafted += rounds * num_draft_tokens
        self._accepted_at += [0] * (num_draft_tokens - len(self._accepted_at))
        for position in range(num_draft_tokens):
            self._accepted_at[position] += sum(histogram[position + 1 :])

    def counters(self) -> AcceptanceCounters:
        return AcceptanceCounters(
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=sum(self._accepted_at),
            accepted_per_position=tuple(self._accepted_at),
        )
