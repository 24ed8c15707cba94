"""TimeLimit is a moment at which work has to end that could go on."""

from __future__ import annotations

import time


class TimeLimit:
    """A moment at which something has to end."""

    def __init__(self, seconds: float) -> None:
        """Set the moment ``seconds`` from now."""
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative afterwards."""
        return self._end_s - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the moment has come."""
        return self.left_s <= 0
