"""AnswerCounts counts accepted guesses, and computes sums that show the spread between answers."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from spec_core.records import AcceptanceCounters


class AnswerRounds(NamedTuple):
    """The number of verifications of one answer so far, and the number of guesses accepted in them."""

    rounds: int = 0
    accepted: int = 0


class AnswerCounts:
    """Adds up the verifications of all answers, as each verification is reported.

    The caller keeps an AnswerRounds, the counts of one answer, for each answer that is being generated.
    """

    def __init__(self) -> None:
        """Start all counts at zero."""
        self._accepted: Counter[int] = Counter()
        """Number of accepted guesses -> number of verifications that accepted so many."""
        self._answers = self._squared_rounds = self._squared_accepted = self._rounds_times_accepted = 0

    def add(self, answer: AnswerRounds, accepted: int) -> AnswerRounds:
        """Count one verification of ``answer``, with ``accepted`` guesses; return the answer's new counts."""
        new = AnswerRounds(answer.rounds + 1, answer.accepted + accepted)
        self._accepted[accepted] += 1
        self._answers += answer.rounds == 0
        self._squared_rounds += new.rounds**2 - answer.rounds**2
        self._squared_accepted += new.accepted**2 - answer.accepted**2
        self._rounds_times_accepted += new.rounds * new.accepted - answer.rounds * answer.accepted
        return new

    def counted(self, num_draft_tokens: int) -> AcceptanceCounters:
        """Return all counts. ``num_draft_tokens``: number of guesses of each verification."""
        counts = (
            AcceptanceCounters.of_rounds(num_draft_tokens, min(accepted, num_draft_tokens), rounds)
            for accepted, rounds in self._accepted.items()
        )
        by_answer = AcceptanceCounters(
            answers=self._answers,
            squared_rounds=self._squared_rounds,
            squared_accepted=self._squared_accepted,
            rounds_times_accepted=self._rounds_times_accepted,
        )
        return sum(counts, by_answer)
