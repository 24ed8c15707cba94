"""Parse the metrics of a running server in Prometheus' text exposition format.

The parser of ``prometheus_client`` takes quadratic time for a line of many labels, by which a hostile server
could stop the caller. This parser takes linear time.
"""

from __future__ import annotations

import math
import re

from spec_core.records import AcceptanceCounters

_SAMPLE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?", re.ASCII
)
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)
_LARGEST = 1 << 53
"""Largest count that is read. Counts are divided as floats, which cannot hold every larger integer."""
_MOST_POSITIONS = 1024
"""Largest number of positions of guesses that are read."""


class ServerMetrics:
    """Counters of a page of metrics. Several samples of one name, such as one for each engine, are summed."""

    def __init__(self, text: str) -> None:
        """Read the samples. Lines that are not samples, and values that are not counts, are left out."""
        self._samples: dict[str, list[tuple[dict[str, str], int]]] = {}
        for line in text.splitlines():
            sample = _SAMPLE.fullmatch(line.strip())
            if sample is not None and (value := _count(sample["value"])) is not None:
                labels = dict(_LABEL.findall(sample["labels"] or ""))
                self._samples.setdefault(sample["name"], []).append((labels, value))

    def total(self, name: str) -> int | None:
        """Return the sum of a counter over all its labels, or None if the server does not have it."""
        samples = self._samples.get(name)
        return None if samples is None else sum(value for _, value in samples)

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Return the sum of a counter for each value of a label."""
        sums: dict[str, int] = {}
        for labels, value in self._samples.get(name, ()):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0) + value
        return sums

    def acceptance(self, program: str) -> AcceptanceCounters | None:
        """Return the counters of verifications, under the names that vLLM and llama.cpp give them.

        ``program``: the prefix of the names, such as ``vllm``. None if the server does not have them.
        """
        name = f"{program}:spec_decode_num_"
        rounds, accepted = self.total(f"{name}drafts_total"), self.total(f"{name}accepted_tokens_total")
        if rounds is None or accepted is None:
            return None
        by_position = self.by_label(f"{name}accepted_tokens_per_pos_total", "position")
        positions = {
            int(position): count
            for position, count in by_position.items()
            if position.isdecimal() and len(position) < 5
        }
        length = min(max(positions, default=-1) + 1, _MOST_POSITIONS)
        return AcceptanceCounters(
            rounds=rounds,
            drafted=self.total(f"{name}draft_tokens_total") or 0,
            accepted=accepted,
            accepted_per_position=tuple(positions.get(position, 0) for position in range(length)),
        )

    def histogram(self, name: str) -> tuple[tuple[float, int], ...]:
        """Return pairs (upper bound, number of values up to it), ascending; empty if there is no histogram."""
        bounds = self.by_label(f"{name}_bucket", "le")
        found = [(bound, count) for word, count in bounds.items() if (bound := _bound(word)) is not None]
        return tuple(sorted(found))


def _bound(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _count(word: str) -> int | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return int(value) if 0 <= value <= _LARGEST else None
