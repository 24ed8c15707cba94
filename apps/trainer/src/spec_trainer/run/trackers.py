"""Check and open the trackers of a run, such as TensorBoard, that section ``track`` enables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from spec_core import Tracker, plugins
from spec_core.errors import ConfigError
from spec_core.foreign import cause
from spec_core.wording import shortened, shown
from spec_trainer.configuration.track import TrackConfig, is_asked_for
from spec_trainer.run.directory import RunDirectory

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
"""Seconds that a tracker has at the end of a run to send the remaining steps (K5)."""
_MOST_WAITING = 10_000
"""Largest number of steps in a tracker's queue."""


def check_trackers(config: TrackConfig) -> None:
    """Raise UsageError if a tracker that the configuration enables, or its client library, cannot be used."""
    for name in _asked(config):
        found = plugins.availability(Tracker, name)
        if not found.ok:
            raise ConfigError(f"track.{name}: {found.reason}, or remove the key")


def build_trackers(config: TrackConfig, directory: RunDirectory) -> list[GuardedTracker]:
    """Return the trackers that the configuration enables; each runs in a separate thread."""
    return [GuardedTracker(name, value, directory.root) for name, value in _asked(config).items()]


class GuardedTracker:
    """Runs a tracker in a thread. If the tracker raises or hangs, the run goes on without it.

    A warning is logged. So a slow or failing service neither delays the training nor hides a training error (K7).
    """

    def __init__(self, name: str, value: object, folder: Path) -> None:
        """Start the thread that opens the tracker ``name`` and passes metrics to it.

        ``value``: the tracker's value in section ``track``. ``folder``: the run directory.
        """
        self.name = name
        self.failure: str | None = None
        """The tracker's first failure and its reason; None if it has not failed."""
        self._value = value
        self._steps: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(folder,), name=f"track.{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue the scalars of a step for the tracker; return at once."""
        if self.failure is None and self._steps.qsize() >= _MOST_WAITING:
            self._fail(f"has not taken {_MOST_WAITING} steps")
        if self.failure is None:
            self._steps.put((step, scalars))

    def close(self) -> None:
        """Wait at most a minute until the tracker has processed all steps and is closed."""
        self._steps.put(None)
        self._thread.join(1.0 if self.failure else _CLOSE_S)
        if self._thread.is_alive() and self.failure is None:
            self._fail(f"has not sent everything within {_CLOSE_S:.0f} s of the end")

    def _work(self, folder: Path) -> None:
        doing = "open"
        try:
            tracker = plugins.load(Tracker, self.name)(self._value, folder)
            while (entry := self._steps.get()) is not None and self.failure is None:
                doing = f"take step {entry[0]}"
                tracker.log(*entry)
            doing = "close"
            tracker.close()
        except BaseException as error:  # noqa: BLE001 (SystemExit too: whatever a tracker raises ends itself alone)
            self._fail(f"did not {doing}: {cause(error)}")

    def _fail(self, problem: str) -> None:
        if self.failure is not None:
            return
        self.failure = shortened(problem, 500)
        log.warning(
            "track.%s=%s: tracker of %s %s; the run goes on without it",
            self.name, shown(self._value), plugins.find(Tracker, self.name).owner, self.failure,
        )  # fmt: skip


def _asked(config: TrackConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: value for name, value in values.items() if is_asked_for(value)}
