"""Check the ServerCounters that an engine's plugin returns, before figures are computed from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields

from spec_core.records import AcceptanceCounters, ServerCounters
from spec_core.wording import shown

_LARGEST = 1 << 53
"""Largest count. Counts are divided as floats, which cannot hold every larger integer."""


def checked_counters(answer: object) -> ServerCounters | None:
    """Return the answer of ``Serving.counters``. Raise TypeError, or ValueError that names an invalid field."""
    if answer is None:
        return None
    if not isinstance(answer, ServerCounters):
        raise TypeError(f"it returned {type(answer).__name__}, expected ServerCounters or None")
    for name, value, expected in _problems(answer):
        raise ValueError(f"{name}={shown(value)}, expected {expected}")
    return answer


def _problems(counters: ServerCounters) -> Iterator[tuple[str, object, str]]:
    """Yield each invalid field: its name, its value, and what was expected."""
    whole = f"an integer from 0 to {_LARGEST}"
    for name in ("generated_tokens", "cached_tokens"):
        if not _is_count(value := getattr(counters, name)):
            yield name, value, whole
    acceptance: object = counters.acceptance
    if isinstance(acceptance, AcceptanceCounters):
        for field in fields(acceptance):
            name = field.name
            value = getattr(acceptance, name)
            if name == "accepted_per_position":
                if not (isinstance(value, tuple) and all(map(_is_count, value))):
                    yield f"acceptance.{name}", value, f"a tuple with, per position, {whole}"
            elif not _is_count(value):
                yield f"acceptance.{name}", value, whole
    elif acceptance is not None:
        yield "acceptance", acceptance, "AcceptanceCounters or None"
    if not _is_histogram(counters.inter_token_latency):
        pairs = "a tuple of pairs (upper bound in seconds, number of latencies up to it), both ascending"
        yield "inter_token_latency", counters.inter_token_latency, pairs


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _is_histogram(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        and all(isinstance(bound, int | float) and not math.isnan(bound) for bound, _ in value)
        and all(_is_count(count) for _, count in value)
        and all(low[0] < high[0] and low[1] <= high[1] for low, high in itertools.pairwise(value))
    )
