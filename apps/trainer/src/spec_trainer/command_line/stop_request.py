"""SIGINT, SIGTERM and SIGHUP request a stop after the running step; a second SIGINT interrupts at once."""

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


_NOTICE = b"spec-trainer: stopping after this step; a second Ctrl-C stops at once\n"


class StopRequest(AbstractContextManager["StopRequest"]):
    """Signal handlers for the duration of a run; enter it in the main thread."""

    def __init__(self) -> None:
        """Prepare; signals are handled from ``__enter__`` on."""
        self.requested = False
        self._callback: Callable[[], None] | None = None
        self._previous: dict[signal.Signals, object] = {}

    def on_request(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called in the signal handler."""
        self._callback = callback

    def __enter__(self) -> Self:
        """Install the handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as nohup has set it: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            with suppress(OSError):  # a handler may not log: it may have interrupted the logger
                os.write(2, _NOTICE)
        self.requested = True
        if self._callback is not None:
            self._callback()
