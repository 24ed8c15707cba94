"""TensorBoardTracker writes event files into the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from spec_core import Tracker
from spec_core.errors import ConfigError
from spec_core.records import Availability
from spec_trackers.client import client_installed


class TensorBoardTracker(Tracker):
    """Writes scalars into a folder for TensorBoard."""

    name: ClassVar[str] = "tensorboard"
    api_version: ClassVar[int] = 1
    Value: ClassVar[Any] = bool
    default: ClassVar[Any] = False
    description: ClassVar[str] = "Writes event files into the run directory; needs tensorboard installed."

    @classmethod
    def probe(cls) -> Availability:
        """Return whether tensorboard is installed."""
        return client_installed("tensorboard")

    def __init__(self, value: bool, folder: Path) -> None:
        """Write event files below ``folder``. Raise ConfigError if they would be written elsewhere."""
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(value, folder)
        events = folder / "tensorboard"
        if events.is_symlink():
            raise ConfigError(
                f"{events} is a link, and event files go into the run directory only; remove the link"
            )
        self._writer = SummaryWriter(str(events))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a training step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the buffered events and close the file."""
        self._writer.close()
