"""SIGINT, SIGTERM and SIGHUP ask the loop to stop after the running step; asked twice, SIGINT interrupts at once."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class Interrupted(Exception):
    """The run stopped because a user asked it to, after it had saved a checkpoint; exit code 130, and no error."""


_HEARD = b"spec-trainer: stopping after this step; a second Ctrl-C stops at once\n"


class StopRequest(AbstractContextManager["StopRequest"]):
    """Installed for the duration of a run; must be entered in the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._told: Callable[[], None] | None = None
        self._previous: dict[signal.Signals, object] = {}

    def on_request(self, told: Callable[[], None]) -> None:
        """``told`` is called in the signal handler."""
        self._told = told

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as nohup has set it: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            with suppress(OSError):  # a handler may not log: it may have interrupted the logger
                os.write(2, _HEARD)
        self.requested = True
        if self._told is not None:
            self._told()
