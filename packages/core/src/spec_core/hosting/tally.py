"""Tally: acceptance, added up over rounds."""

from __future__ import annotations

from spec_core.records import AcceptanceCounters


class Tally:
    def __init__(self) -> None:
        self._rounds = self._drafted = 0
        self._accepted_at: list[int] = []

    def add(self, drafted: int, accepted: int, rounds: int = 1) -> None:
        """``rounds`` verifications, each of ``drafted`` tokens, of which the first ``accepted`` stand."""
        self._rounds += rounds
        self._drafted += rounds * drafted
        self._accepted_at += [0] * (drafted - len(self._accepted_at))
        for position in range(accepted):
            self._accepted_at[position] += rounds

    def counters(self) -> AcceptanceCounters:
        return AcceptanceCounters(
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=sum(self._accepted_at),
            accepted_per_position=tuple(self._accepted_at),
        )
