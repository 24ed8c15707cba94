"""This module has the options and answers of generation, and the counters of speculative decoding.

``spec_core.records`` re-exports them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest

_TOO_FEW_ANSWERS = 6
"""Largest number of answers for which the error of the acceptance length is not estimated."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of generation; ``temperature`` 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability, if ``temperature`` >
    0."""
    seed: int = 0
    num_draft_tokens: int = 0
    """Number of tokens that the loaded draft proposes per round; 0 decodes without a draft."""
    stop_at_eos: bool = True
    with_margins: bool = True
    """Whether to return ``Generation.top2_margin``, which costs some engines time."""
    with_times: bool = False
    """Whether to return ``Generation.times_s``; the engine then streams its answers."""
    concurrency: int | None = None
    """Largest number of prompts that are answered at the same time; None means as many as the engine can."""

    def prompt_seed(self, index: int) -> int:
        """Return the seed of prompt ``index``, so that the answer does not depend on the previous prompts."""
        return self.seed * 1_000_003 + index


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRequest:
    """A prompt to answer, and the seed with which its answer is sampled. Each request equals only itself."""

    prompt: Sequence[int]
    """Token ids; a ``PromptWithImages`` has images, too."""
    seed: int | None = 0
    """None: the engine draws with random numbers of its own, which is faster in engines that draw for many answers at
    once."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One answer: the new tokens, without the prompt."""

    token_ids: tuple[int, ...]
    top2_margin: tuple[float, ...] = ()
    """Per token, the difference of the target's two largest logits, if the engine returns it. A
    difference near 0 explains why two greedy runs diverge."""
    guess_depths: tuple[int, ...] = ()
    """Per token, the index k ≥ 1 of the guess in its round that was verified at this token's position; 0
    if there was no such guess. All earlier guesses of the round were accepted; the target accepted guess k or
    replaced it by this token. Empty if the engine does not report it."""
    refused_guesses: tuple[int, ...] = ()
    """Per token, the id of the refused guess that the token replaced; −1 if it replaced none. Empty if
    the engine does not report it."""
    verifications: tuple[int, ...] = ()
    """Element k: number of the answer's verifications that accepted k guesses. Empty if the engine does not count
    them."""
    cached_tokens: int = 0
    """Number of prompt tokens that came from a prefix cache; 0 if the engine does not count them."""
    times_s: tuple[float, ...] = ()
    """Per token, the seconds from the start of the request until the engine returned the token. The
    tokens of one verification are returned together. Empty if not asked for, or if the engine does not
    stream."""
    draft_version: int | None = None
    """Version of the draft that served the answer (the last if it changed meanwhile); None if none was
    pushed."""
    draft_digest: str = ""
    """``Manifest.digest`` of the draft that served the answer."""

    def up_to(self, end_token_ids: Collection[int]) -> Generation:
        """Return the answer without the tokens after its first end token; ``verifications`` count them still."""
        places = (place for place, token in enumerate(self.token_ids, 1) if token in end_token_ids)
        length = next(places, len(self.token_ids))
        return replace(self, **{name: getattr(self, name)[:length] for name in _OF_EACH_TOKEN})

    @property
    def acceptance(self) -> AcceptanceCounters:
        """Acceptance counters of this answer, from ``verifications``.

        ``drafted`` counts only the accepted guesses.
        """
        counters = AcceptanceCounters()
        for accepted, rounds in enumerate(self.verifications):
            counters += AcceptanceCounters.of_rounds(accepted, accepted, rounds)
        return counters


@dataclass(frozen=True, kw_only=True)
class AcceptanceCounters:
    """Counters of speculative decoding, which can be added and subtracted. Prefill is not counted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Element k: number of rounds in which the guess at draft position k was accepted."""
    answers: int = 0
    """Number of answers that the rounds belong to. 0 if the engine does not count per answer; then the three
    sums over answers below are 0, too."""
    squared_rounds: int = 0
    squared_accepted: int = 0
    rounds_times_accepted: int = 0

    @classmethod
    def of_rounds(cls, drafted: int, accepted: int, rounds: int = 1) -> AcceptanceCounters:
        """Return the counters of ``rounds`` verifications, each accepting ``accepted`` of ``drafted`` guesses."""
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
        """Standard error of ``acceptance_length``; infinite if there are too few answers to estimate it.

        Rounds of one answer are correlated, so answers are the sampling units of a ratio estimator (Cochran,
        *Sampling Techniques*, 2.11). The variance is divided by n − 6 instead of n − 1, so that with few
        answers an interval of three standard errors covers about as much as the interval by Student's t
        distribution.
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
        """Element k: share of the rounds in which the guess at draft position k was accepted."""
        return [count / self.rounds if self.rounds else 0.0 for count in self.accepted_per_position]

    def __add__(self, other: AcceptanceCounters) -> AcceptanceCounters:
        """Return the sum, position by position."""
        return self._combined(other, 1)

    def __sub__(self, other: AcceptanceCounters) -> AcceptanceCounters:
        """Return the counts since ``other``, an earlier value of the same counters."""
        return self._combined(other, -1)

    def _combined(self, other: AcceptanceCounters, sign: int) -> AcceptanceCounters:
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in _SUMS}
        return AcceptanceCounters(
            accepted_per_position=tuple(one + sign * two for one, two in positions), **sums
        )


@dataclass(frozen=True, kw_only=True)
class ServerCounters:
    """Counters of a running server since its start, read from its metrics. They can be subtracted."""

    generated_tokens: int
    cached_tokens: int = 0
    """Tokens of prompts that came from a prefix cache."""
    acceptance: AcceptanceCounters | None = None
    """Acceptance counters; None if the server does not use a draft."""
    inter_token_latency: tuple[tuple[float, int], ...] = ()
    """Histogram: pairs of an upper bound in seconds (ascending, the last may be infinite) and the number of
    latencies up to this bound."""

    def __sub__(self, other: ServerCounters) -> ServerCounters:
        """Return the counts since ``other``, an earlier value of the same counters."""
        before = other.acceptance or AcceptanceCounters()
        latencies = dict(other.inter_token_latency)
        return ServerCounters(
            generated_tokens=self.generated_tokens - other.generated_tokens,
            cached_tokens=self.cached_tokens - other.cached_tokens,
            acceptance=None if self.acceptance is None else self.acceptance - before,
            inter_token_latency=tuple(
                (bound, count - latencies.get(bound, 0)) for bound, count in self.inter_token_latency
            ),
        )

    def latency_quantile(self, share: float) -> float | None:
        """Return the quantile ``share`` of the inter-token latencies in seconds; None if there are none.

        Within a bucket the quantile is interpolated, as by ``histogram_quantile`` of Prometheus. Above the highest
        finite bound it is infinite.
        """
        total = self.inter_token_latency[-1][1] if self.inter_token_latency else 0
        if total <= 0:
            return None
        lower = 0.0
        below = 0
        for bound, count in self.inter_token_latency:
            if count >= share * total:
                if math.isinf(bound):
                    break
                return lower + (bound - lower) * (share * total - below) / max(1, count - below)
            lower = bound
            below = count
        return math.inf


_SUMS = [field.name for field in fields(AcceptanceCounters) if field.name != "accepted_per_position"]
_OF_EACH_TOKEN = ("token_ids", "top2_margin", "guess_depths", "refused_guesses", "times_s")
"""Fields of Generation that have one element for each token."""
