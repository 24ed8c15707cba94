"""Timer adds up the seconds that a run spends under each name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the seconds that a run spends under each name: ``with timer("data"): …``."""

    def __init__(self) -> None:
        """Start the clock."""
        self.start_s = time.monotonic()
        self.total_s: dict[str, float] = defaultdict(float)
        """Seconds under each name, since the start."""
        self.last_s: dict[str, float] = {}
        """Seconds of the latest ``with`` block of each name."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the duration of the ``with`` block to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.last_s[name] = time.perf_counter() - start
            self.total_s[name] += self.last_s[name]

    @property
    def wall_s(self) -> float:
        """Seconds since this timer was created."""
        return time.monotonic() - self.start_s

    def breakdown(self) -> dict[str, float]:
        """Return name -> seconds; ``other`` is the rest of the wall time."""
        named = dict(self.total_s)
        return {**named, "other": max(0.0, self.wall_s - sum(named.values()))}
