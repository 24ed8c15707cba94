"""SIGINT, SIGTERM and SIGHUP request a stop after the current step; a second SIGINT interrupts at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Self


class Interrupted(Exception):
    """The command stopped at the user's request and can be continued; exit code 130, not an error."""


_NOTICE = b"spec-trainer: stopping after this step; a second Ctrl-C stops at once\n"


class StopRequest(AbstractContextManager["StopRequest"]):
    """Handles stop signals during the ``with`` block, which must be entered in the main thread."""

    def __init__(self) -> None:
        """Create the object only; ``__enter__`` installs the signal handlers."""
        self.requested = False
        self._callback: Callable[[], None] | None = None
        self._timers: list[threading.Timer] = []
        self._previous: dict[signal.Signals, object] = {}

    def on_request(self, callback: Callable[[], None]) -> None:
        """Set a function that the signal handler calls when a stop is requested."""
        self._callback = callback

    def request_after(self, seconds: float) -> None:
        """Request a stop after ``seconds``, unless the ``with`` block has ended by then."""
        timer = threading.Timer(max(0.0, seconds), self._stop)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def __enter__(self) -> Self:
        """Install the handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as nohup has set it: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the previous handlers."""
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            with suppress(OSError):  # a handler may not log: it may have interrupted the logger
                os.write(2, _NOTICE)
        self._stop()

    def _stop(self) -> None:
        self.requested = True
        if self._callback is not None:
            self._callback()
