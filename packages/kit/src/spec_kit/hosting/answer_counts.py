"""AnswerCounts: how many guesses verifications have accepted, and how alike those of one answer are."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from spec_core.records import AcceptanceCounters


class AnswerRounds(NamedTuple):
    """Verifications of one answer so far, and the guesses that they have accepted."""

    rounds: int = 0
    accepted: int = 0


class AnswerCounts:
    """Counts verifications one by one, in a few additions each; the caller keeps what each answer has had so far."""

    def __init__(self) -> None:
        """Count from now on."""
        self._accepted: Counter[int] = Counter()
        """Verifications by the number of guesses that they have accepted."""
        self._answers = self._squared_rounds = self._squared_accepted = self._rounds_times_accepted = 0

    def add(self, answer: AnswerRounds, accepted: int) -> AnswerRounds:
        """Count one more verification of an answer; return what the answer has had now."""
        new = AnswerRounds(answer.rounds + 1, answer.accepted + accepted)
        self._accepted[accepted] += 1
        self._answers += answer.rounds == 0
        self._squared_rounds += new.rounds**2 - answer.rounds**2
        self._squared_accepted += new.accepted**2 - answer.accepted**2
        self._rounds_times_accepted += new.rounds * new.accepted - answer.rounds * answer.accepted
        return new

    def counted(self, num_draft_tokens: int) -> AcceptanceCounters:
        """Return the counts, of verifications of so many guesses each."""
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
