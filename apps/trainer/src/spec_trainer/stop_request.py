"""SIGINT and SIGTERM ask the loop to stop after the running step; asked twice, SIGINT interrupts at once."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from types import FrameType
from typing import Self


class StopRequest(AbstractContextManager["StopRequest"]):
    """Installed for the duration of a run; must be entered in the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
