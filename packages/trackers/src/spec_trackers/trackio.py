"""TrackioTracker sends scalars to Trackio."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import ClassVar

from spec_core import Tracker
from spec_core.records import Availability
from spec_trackers.client import client_installed, stored_run_id


class TrackioTracker(Tracker):
    """Sends scalars to Trackio, on this host or at the server that Trackio's environment variables name."""

    name: ClassVar[str] = "trackio"
    api_version: ClassVar[int] = 1
    description: ClassVar[str] = "Trackio project name."

    @classmethod
    def probe(cls) -> Availability:
        """Return whether trackio is installed."""
        return client_installed("trackio")

    def __init__(self, value: str, folder: Path) -> None:
        """Log to the project called ``value``, as a run with the run directory's name and an id."""
        import trackio

        super().__init__(value, folder)
        number = stored_run_id(folder, "trackio", lambda: secrets.token_hex(4))
        with redirect_stdout(sys.stderr):  # trackio prints how to look at the run
            self._run = trackio.init(
                project=value,
                name=f"{folder.resolve().name}-{number}",
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the scalars of a training step."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """End the run at Trackio."""
        with redirect_stdout(sys.stderr):
            self._run.finish()
