"""FailingTracker: raises where its key says, and prints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar

from spec_core import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class FailingTracker(Tracker):
    """Fails in the call that ``track.failing`` names."""

    name: ClassVar[str] = "failing"
    api_version: ClassVar[int] = 1
    description: ClassVar[str] = "Call in which the tracker fails: open, log, exit or close."

    def __init__(self, value: str, folder: Path) -> None:
        """Print, and fail where that is asked for."""
        super().__init__(value, folder)
        self._act("open")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the first step, and fail at the second where that is asked for."""
        if step > 1:
            self._act("log")
            self._act("exit")

    def close(self) -> None:
        """Print, and fail where that is asked for."""
        self._act("close")

    def _act(self, call: str) -> None:
        print(f"failing: {call}", flush=True)
        if call == self.value == "exit":
            sys.exit(7)
        if call == self.value:
            raise ConnectionError(f"the service is gone ({call})")
