"""Say every ten seconds what a command waits for, so that a user sees that it is alive."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from typing import Self

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
"""Seconds between two lines of a command that waits, or makes progress."""


class Waiting(AbstractContextManager["Waiting"]):
    """Logs a line if a command has waited for ten seconds for the same thing, and again after each ten seconds."""

    def __init__(self, what: str) -> None:
        """Prepare to wait for the end of ``what``, such as ``starting engine vllm``."""
        self._what = what
        self._changed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._log, name="waiting", daemon=True)

    def begin(self, what: str) -> None:
        """Wait for the end of ``what`` from now on."""
        self._what = what
        self._changed.set()

    def __enter__(self) -> Self:
        """Begin to wait."""
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End the wait."""
        self._ended = True
        self._changed.set()
        self._thread.join()

    def _log(self) -> None:
        waited_s = 0.0
        while not self._ended:
            if self._changed.wait(LINE_EVERY_S):
                self._changed.clear()
                waited_s = 0.0
                continue
            waited_s += LINE_EVERY_S
            log.info("%s: %.0f s so far", self._what, waited_s)
