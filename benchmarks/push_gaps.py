"""Gaps between tokens of the push benchmark's load: those of windows with pushes beside those of windows without."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    Window = tuple[float, float]

SHARES = {"p50_ms": 0.5, "p99_ms": 0.99, "p99_9_ms": 0.999}


def gaps_of(answers: Sequence[dict[str, Any]], begun_s: float, ended_s: float) -> list[float]:
    """Return the seconds between tokens of one answer that follow each other, for all that overlap the time."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in pairwise(answer["times_s"])
        if later > begun_s and earlier < ended_s
    ]


def gap_figures(gaps: Sequence[float]) -> dict[str, float]:
    """Return the gaps' number, median, 99th and 99.9th percentile, and largest."""
    ordered = sorted(gaps)
    if not ordered:
        return {"count": 0}
    last = len(ordered) - 1
    shares = {name: 1e3 * ordered[min(last, int(share * len(ordered)))] for name, share in SHARES.items()}
    return {"count": len(ordered), **shares, "longest_ms": 1e3 * ordered[-1]}


def window_figures(answers: Sequence[dict[str, Any]], windows: Sequence[Window]) -> dict[str, Any]:
    """Return the figures of several windows together and of each: a spike of the load itself is in some."""
    each = [gaps_of(answers, *window) for window in windows]
    together = [gap for gaps in each for gap in gaps]
    return {**gap_figures(together), "windows": [gap_figures(gaps) for gaps in each]}


def longest_in_slices(
    answers: Sequence[dict[str, Any]], windows: Sequence[Window], slice_s: float
) -> list[float]:
    """Return the longest gap in milliseconds of each slice of quiet windows."""
    slices = [
        (begun_s + number * slice_s, begun_s + (number + 1) * slice_s)
        for begun_s, ended_s in windows
        for number in range(int((ended_s - begun_s) / slice_s))
    ]
    return [1e3 * max(gaps_of(answers, *part), default=0.0) for part in slices]


def beside_quiet(
    answers: Sequence[dict[str, Any]],
    pushes: Sequence[dict[str, Any]],
    quiet: Sequence[Window],
    settle_s: float,
) -> dict[str, Any]:
    """Return the longest gap around each push but the first, and in slices of the quiet windows that are as long.

    ``shares_above_ms`` has the share of both that is longer than so many milliseconds.
    """
    around = [(row["begun_s"], row["ended_s"] + settle_s) for row in pushes]
    first, *longest = [1e3 * max(gaps_of(answers, *window), default=0.0) for window in around]
    slice_s = statistics.median(ended - begun for begun, ended in around)
    quiet_longest = longest_in_slices(answers, quiet, slice_s)
    return {
        "longest_gap_of_first_push_ms": first,
        "longest_gap_of_each_push_ms": longest,
        "longest_gap_of_each_quiet_slice_ms": quiet_longest,
        "shares_above_ms": {
            str(limit): {"push": _share_above(longest, limit), "quiet": _share_above(quiet_longest, limit)}
            for limit in (20, 40, 60)
        },
    }


def _share_above(values: Sequence[float], limit: float) -> float:
    return sum(value > limit for value in values) / max(1, len(values))
