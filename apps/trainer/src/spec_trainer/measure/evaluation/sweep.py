"""Find the fastest number of draft tokens for each number of concurrent answers, from a sweep over both.

Speeds are compared as speed-ups over decoding without a draft, so that each load has equal weight in a mean. A number
of 0 stands for decoding without a draft.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from spec_core.wording import counted
from spec_trainer.measure.evaluation.validity import short_passes
from spec_trainer.workers.passes import Pass


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The timed passes of a sweep."""

    plain: Mapping[int, Pass]
    """Number of concurrent answers -> the pass without a draft."""
    drafted: Mapping[int, Mapping[int, Pass]]
    """Number of draft tokens -> number of concurrent answers -> the pass with the draft."""

    @property
    def best_fixed(self) -> int:
        """The number of draft tokens with the largest mean speed-up over all loads."""
        return max(self.drafted, key=self.mean_speedup)

    def speedup(self, num_draft_tokens: int, size: int) -> float:
        """Return the speed-up at one load; 1 without a draft."""
        if not num_draft_tokens:
            return 1.0
        return self.drafted[num_draft_tokens][size].tokens_per_s / self.plain[size].tokens_per_s

    def mean_speedup(self, num_draft_tokens: int) -> float:
        """Return the mean speed-up over all loads."""
        return fmean(self.speedup(num_draft_tokens, size) for size in self.plain)

    def fastest(self, size: int) -> int:
        """Return the fastest number of draft tokens at one load; 0 if none is faster than no draft."""
        return max((0, *self.drafted), key=lambda number: self.speedup(number, size))

    def draft_tokens_by_load(self) -> dict[int, int]:
        """Return number of concurrent answers -> the fastest number of draft tokens from that number on.

        The keys ascend from 1. Between two measured loads, speed-ups are interpolated linearly over the logarithm of
        the load, as in ``break_even``; the number changes where the next one becomes the faster.
        """
        found = dict[int, int]()
        last = None
        for low, high in itertools.pairwise((None, *sorted(self.plain))):
            assert high is not None
            number = self.fastest(high)
            if number != last:
                found[1 if low is None or last is None else self._border(low, high, last, number)] = number
            last = number
        return found

    def _border(self, low: int, high: int, before: int, after: int) -> int:
        """Estimate the first load between two measured ones at which ``after`` is faster than ``before``."""
        loss = self.speedup(before, low) - self.speedup(after, low)
        gain = self.speedup(after, high) - self.speedup(before, high)
        share = loss / (loss + gain) if gain else 1.0
        border = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        return min(high, max(low, math.floor(border)) + 1)

    def describe(self) -> dict[str, Any]:
        """Return the section ``sweep`` of the document of ``evaluate``."""
        best = {size: self.fastest(size) for size in sorted(self.plain)}
        fixed = max((0, self.best_fixed), key=self.mean_speedup)
        by_load = fmean(self.speedup(number, size) for size, number in best.items())
        return {
            "loads": [
                {
                    "concurrency": size,
                    "tokens_per_s_without_draft": self.plain[size].tokens_per_s,
                    "numbers": [self._describe_pass(number, size) for number in sorted(self.drafted)],
                    "fastest": number,
                    "speedup": self.speedup(number, size),
                }
                for size, number in best.items()
            ],
            "best_fixed": fixed,
            "mean_speedup_fixed": self.mean_speedup(fixed),
            "mean_speedup_by_load": by_load,
            "gain": by_load / self.mean_speedup(fixed) - 1,
            "draft_tokens_by_load": [
                {"from_concurrency": start, "num_draft_tokens": number}
                for start, number in self.draft_tokens_by_load().items()
            ],
        }

    def _describe_pass(self, number: int, size: int) -> dict[str, Any]:
        one = self.drafted[number][size]
        return {
            "num_draft_tokens": number,
            "tokens_per_s": one.tokens_per_s,
            "speedup": self.speedup(number, size),
            "acceptance_length": one.counters.acceptance_length,
        }

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each pass that was too short, except with the best fixed number."""
        for number, passes in self.drafted.items():
            if number != self.best_fixed:  # its passes are at the document's top level
                for size, one in passes.items():
                    name = f"concurrency {size}, {counted(number, 'draft token')}: "
                    yield from short_passes(name, one.seconds)


def draft_tokens_by_load(document: Mapping[str, Any]) -> dict[int, int]:
    """Return the fastest numbers of draft tokens in a document (see ``Sweep.draft_tokens_by_load``); {} without."""
    steps = document["sweep"]["draft_tokens_by_load"] if document["sweep"] else ()
    return {step["from_concurrency"]: step["num_draft_tokens"] for step in steps}


def sweep_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of speed-ups by load and number of draft tokens, and sentences; nothing without a sweep."""
    sweep = document["sweep"]
    if sweep is None:
        return
    numbers = [row["num_draft_tokens"] for row in sweep["loads"][0]["numbers"]]
    heads = ("without", *(f"x with {number}" for number in numbers), "fastest")
    yield f"{'at once':<9}" + "".join(f"{head:>11}" for head in heads)
    for load in sweep["loads"]:
        cells = (
            f"{load['tokens_per_s_without_draft']:,.1f}",
            *(f"{row['speedup']:.2f}" for row in load["numbers"]),
            str(load["fastest"] or "no draft"),
        )
        yield f"{load['concurrency']:<9}" + "".join(f"{cell:>11}" for cell in cells)
    yield from sweep_sentences(document)


def sweep_sentences(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences with the fastest numbers of draft tokens, what they gain, and which engines take them."""
    sweep = document["sweep"]
    steps = draft_tokens_by_load(document).items()
    parts = [f"{number or 'none'} from {start} at once" for start, number in steps]
    yield f"draft tokens by load: {', '.join(parts)}"
    yield (
        f"mean speed-up over the loads: {sweep['mean_speedup_by_load']:.2f} by load, "
        f"{sweep['mean_speedup_fixed']:.2f} with {_named(sweep['best_fixed'])} for all: a gain of "
        f"{100 * sweep['gain']:.0f} %, measured with engine {document['engine']}"
    )
    for engine, reason in document["not_by_load"].items():
        yield f"{engine} is served with one number for all loads: {reason}"


def _named(number: int) -> str:
    return counted(number, "draft token") if number else "no draft"
