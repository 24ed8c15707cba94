"""WandbTracker sends scalars to Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from spec_core import Tracker
from spec_core.records import Availability
from spec_trackers.client import client_installed, stored_run_id


class WandbTracker(Tracker):
    """Sends scalars to Weights & Biases, in a run of a project."""

    name: ClassVar[str] = "wandb"
    api_version: ClassVar[int] = 1
    description: ClassVar[str] = "Weights & Biases project name."

    @classmethod
    def probe(cls) -> Availability:
        """Return whether wandb is installed."""
        return client_installed("wandb")

    def __init__(self, value: str, folder: Path) -> None:
        """Log to the project called ``value``; the client's files are in ``folder``."""
        import wandb

        super().__init__(value, folder)
        self._run = wandb.init(
            project=value,
            dir=str(folder),
            name=folder.resolve().name,
            id=stored_run_id(folder, "wandb", lambda: secrets.token_hex(8)),
            resume="allow",
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the scalars of a training step."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """End the run at Weights & Biases."""
        self._run.finish()
