"""Compute speed and latencies by concurrency, and the concurrency from which a draft slows decoding.

Times are measured by a client that reads answers as they arrive. The inter-token latency of an answer is the time
from its first to its last token, divided by the number of tokens after the first. So every token that a verification
accepts counts.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_trainer.workers.passes import Pass


@dataclass(frozen=True, kw_only=True)
class AnswerTimes:
    """Arrival times of one answer, in seconds since its request."""

    num_tokens: int
    parts_s: Sequence[float]
    """Arrival times of the chunks of the answer, ascending. Each chunk has at least one token."""

    @property
    def per_token_s(self) -> float:
        """Inter-token latency in seconds; the answer must have at least two tokens."""
        return (self.parts_s[-1] - self.parts_s[0]) / (self.num_tokens - 1)


def describe_load(one: Pass) -> dict[str, Any]:
    """Return the speed of a pass, in total and per user, and its latencies in milliseconds.

    Latencies and the speed per user are None if the engine does not stream, because they need the tokens'
    arrival times.
    """
    timed = [
        AnswerTimes(num_tokens=len(answer.times_s), parts_s=sorted(set(answer.times_s)))
        for answer in one.answers
        if answer.times_s
    ]
    return {"tokens_per_s": one.tokens_per_s, **describe_times(timed)}


def describe_times(timed: Sequence[AnswerTimes]) -> dict[str, Any]:
    """Return the speed per user, and the latencies in milliseconds, of streamed answers."""
    per_token = [answer.per_token_s for answer in timed if answer.num_tokens > 1]
    gaps = [after - before for answer in timed for before, after in itertools.pairwise(answer.parts_s)]
    return {
        "tokens_per_s_per_user": fmean(1 / seconds for seconds in per_token if seconds)
        if any(per_token)
        else None,
        "time_to_first_token_ms": _distribution([answer.parts_s[0] for answer in timed]),
        "inter_token_latency_ms": _distribution(per_token),
        "time_between_parts_ms": _distribution(gaps),
    }


def describe_loads(plain: Mapping[int, Pass], drafted: Mapping[int, Pass]) -> list[dict[str, Any]]:
    """Return, for each concurrency, the figures with the draft and without it."""
    return [
        {
            "concurrency": size,
            "tokens_per_s": drafted[size].tokens_per_s,
            "tokens_per_s_without_draft": without.tokens_per_s,
            "speedup": drafted[size].tokens_per_s / without.tokens_per_s,
            "with_draft": describe_load(drafted[size]),
            "without_draft": describe_load(without),
        }
        for size, without in plain.items()
    ]


def break_even(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the concurrency from which on decoding is slower with the draft than without it.

    There the speed-up is 1. Between two measured concurrencies, the speed-up is interpolated linearly over
    the logarithm of the concurrency. If decoding is faster with the draft at the largest measured
    concurrency, return None. If it is faster at no measured concurrency, return the smallest.
    """
    points = sorted((entry["concurrency"], entry["speedup"]) for entry in entries)
    if not points or points[-1][1] > 1:
        return None
    pays = [place for place, (_, speedup) in enumerate(points) if speedup > 1]
    if not pays:
        return float(points[0][0])
    low, above = points[pays[-1]]
    high, below = points[pays[-1] + 1]
    share = (above - 1) / (above - below)
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {"mean": 1e3 * fmean(seconds), "p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98]}
