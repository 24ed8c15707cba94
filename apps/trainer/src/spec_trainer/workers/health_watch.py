"""HealthWatch checks an engine's health regularly, and reports a failure to the controller."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Self

from spec_core import Engine
from spec_core.errors import SpecError
from spec_trainer.workers.worker_main import ControllerLink

_CHECKS_PER_TIMEOUT = 8
_LEAVING_S = 1.0
"""Seconds to wait on exit for a check in progress."""


class HealthWatch(AbstractContextManager["HealthWatch"]):
    """Watches an engine's health during the ``with`` block, or until the engine fails."""

    def __init__(self, engine: Engine, controller: ControllerLink, peer_s: float) -> None:
        """Prepare to check ``engine`` every ``peer_s`` / 8 seconds; report its failure to ``controller``."""
        self._engine = engine
        self._controller = controller
        self._pause_s = peer_s / _CHECKS_PER_TIMEOUT
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread that checks the engine's health."""
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop the checks of the engine's health."""
        self._left.set()
        self._thread.join(_LEAVING_S)

    def _watch(self) -> None:
        while not self._left.wait(self._pause_s):
            try:
                self._engine.health()
            except SpecError as error:
                if not self._left.is_set():
                    self._controller.report(error)
                return
