"""TimeLimit is a deadline, such as that of a stage of the quickstart."""

from __future__ import annotations

import time


class TimeLimit:
    """A deadline, a number of seconds after the object is made or after ``begin``."""

    def __init__(self, seconds: float, *, has_begun: bool = True) -> None:
        """Set the deadline to ``seconds`` from now, or from the call of ``begin`` if it has not begun."""
        self._seconds = seconds
        self._end_s: float | None = None
        if has_begun:
            self.begin()

    def begin(self) -> None:
        """Set the deadline to its number of seconds from now, unless it has begun."""
        if self._end_s is None:
            self._end_s = time.monotonic() + self._seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative after the deadline."""
        return self._seconds if self._end_s is None else self._end_s - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s <= 0
