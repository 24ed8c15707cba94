"""Requests and answers of generation, and the counters of speculative decoding; ``records`` has them as its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import zip_longest

_TOO_FEW_ANSWERS = 6
"""Number of answers that do not show how far chance moves the acceptance length."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of generation; ``temperature`` 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    """Probability of the most likely tokens that are sampled from, where ``temperature`` > 0."""
    seed: int = 0
    num_draft_tokens: int = 0
    """Tokens that the loaded draft proposes per round; 0 decodes without a draft."""
    stop_at_eos: bool = True
    with_margins: bool = True
    """Whether ``Generation.top2_margin`` is wanted, which costs some engines time."""
    with_times: bool = False
    """Whether ``Generation.times_s`` is wanted: the engine streams its answers, as to a client that reads along."""
    concurrency: int | None = None
    """Most prompts that are answered at once; the next begins when one ends. None: all, as far as the engine can."""

    def prompt_seed(self, index: int) -> int:
        """Return the seed of prompt ``index``, so that its answer does not depend on the prompts before it."""
        return self.seed * 1_000_003 + index


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One answer: the new tokens, without the prompt."""

    token_ids: tuple[int, ...]
    top2_margin: tuple[float, ...] = ()
    """Per token, the gap between the target's two largest logits, if the engine gives it; a tie explains a difference
    between two greedy runs."""
    guess_places: tuple[int, ...] = ()
    """Per token, k ≥ 1 where it stands at guess k of a round that had all guesses before it accepted: the target
    accepted this guess, or put the token in its place. 0 for a token that none was judged for. Empty where the engine
    does not name them."""
    refused_guesses: tuple[int, ...] = ()
    """Per token, the guess that it was put in the place of, −1 where there is none. Empty where the engine does not
    name them."""
    verifications: tuple[int, ...] = ()
    """How many of the answer's verifications accepted 0, 1, … guesses; empty where the engine does not count them."""
    cached_tokens: int = 0
    """Tokens of the prompt that came from a prefix cache, as far as the engine counts them."""
    times_s: tuple[float, ...] = ()
    """Per token, the seconds from the beginning of its request until the engine handed it out; those of one
    verification come together. Empty where they are not wanted, or the engine does not stream."""
    draft_version: int | None = None
    """Version of the draft that served, the last one where it changed meanwhile; None where none was pushed."""
    draft_digest: str = ""
    """Digest of that draft (``Manifest.digest``)."""

    @property
    def acceptance(self) -> AcceptanceCounters:
        """The sums of ``verifications``; how many tokens were drafted is not among them."""
        counters = AcceptanceCounters()
        for accepted, rounds in enumerate(self.verifications):
            counters += AcceptanceCounters.of_rounds(accepted, accepted, rounds)
        return counters


@dataclass(frozen=True, kw_only=True)
class AcceptanceCounters:
    """Counters of speculative decoding, which add and subtract; prefill does not count."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Rounds in which draft position k was accepted."""
    answers: int = 0
    """Answers that the rounds belong to; 0, with the three sums over answers below, where they are not kept apart."""
    squared_rounds: int = 0
    squared_accepted: int = 0
    rounds_times_accepted: int = 0

    @classmethod
    def of_rounds(cls, drafted: int, accepted: int, rounds: int = 1) -> AcceptanceCounters:
        """Return the counts of ``rounds`` verifications of ``drafted`` tokens with ``accepted`` of them accepted."""
        return cls(
            rounds=rounds,
            drafted=rounds * drafted,
            accepted=rounds * accepted,
            accepted_per_position=(rounds,) * accepted + (0,) * (drafted - accepted),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: 1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance_length_error(self) -> float:
        """Standard error of ``acceptance_length`` by chance alone; infinite where there are too few answers to say.

        Rounds of one answer are alike, so answers are the sample: the error of a ratio of sums over them (Cochran,
        *Sampling Techniques*, 2.11). With n − 6 for n − 1, three errors leave as little to chance as Student's t
        does with few answers.
        """
        if min(self.answers, self.rounds) <= _TOO_FEW_ANSWERS:
            return math.inf
        share = self.accepted / self.rounds
        squares = (
            self.squared_accepted - 2 * share * self.rounds_times_accepted + share**2 * self.squared_rounds
        )
        return math.sqrt(max(0.0, squares) / (1 - _TOO_FEW_ANSWERS / self.answers)) / self.rounds

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the rounds in which each draft position was accepted."""
        return [count / self.rounds if self.rounds else 0.0 for count in self.accepted_per_position]

    def __add__(self, other: AcceptanceCounters) -> AcceptanceCounters:
        """Return the sum, position by position."""
        return self._combined(other, 1)

    def __sub__(self, other: AcceptanceCounters) -> AcceptanceCounters:
        """Return what was counted since ``other``."""
        return self._combined(other, -1)

    def _combined(self, other: AcceptanceCounters, sign: int) -> AcceptanceCounters:
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in _SUMS}
        return AcceptanceCounters(
            accepted_per_position=tuple(one + sign * two for one, two in positions), **sums
        )


@dataclass(frozen=True, kw_only=True)
class ServerCounters:
    """Counters of a running server since its start, as its metrics have them; they subtract."""

    generated_tokens: int
    cached_tokens: int = 0
    """Tokens of prompts that came from a prefix cache."""
    acceptance: AcceptanceCounters | None = None
    """None where the server speculates with no draft."""

    def __sub__(self, other: ServerCounters) -> ServerCounters:
        """Return what was counted since ``other``."""
        before = other.acceptance or AcceptanceCounters()
        return ServerCounters(
            generated_tokens=self.generated_tokens - other.generated_tokens,
            cached_tokens=self.cached_tokens - other.cached_tokens,
            acceptance=None if self.acceptance is None else self.acceptance - before,
        )


_SUMS = [field.name for field in fields(AcceptanceCounters) if field.name != "accepted_per_position"]
