"""Where the time goes: seconds by name, summed over a run."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """``with clock("data"): …`` adds to a name; ``last`` is the name's latest stretch."""

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self.total_s: dict[str, float] = defaultdict(float)
        self.last_s: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.last_s[name] = time.perf_counter() - start
            self.total_s[name] += self.last_s[name]

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.start_s

    def breakdown(self) -> dict[str, float]:
        """Every name, and what no name accounts for as ``other``."""
        named = dict(self.total_s)
        return {**named, "other": max(0.0, self.wall_s - sum(named.values()))}
