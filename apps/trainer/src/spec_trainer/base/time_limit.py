"""TimeLimit is a moment at which work has to end that could go on."""

from __future__ import annotations

import time


class TimeLimit:
    """A moment at which something has to end."""

    def __init__(self, seconds: float, *, has_begun: bool = True) -> None:
        """Set the moment ``seconds`` from now, or from the call of ``begin``."""
        self._seconds = seconds
        self._end_s: float | None = None
        if has_begun:
            self.begin()

    def begin(self) -> None:
        """Let the time run from now on."""
        self._end_s = time.monotonic() + self._seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative afterwards."""
        return self._seconds if self._end_s is None else self._end_s - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the moment has come."""
        return self.left_s <= 0
