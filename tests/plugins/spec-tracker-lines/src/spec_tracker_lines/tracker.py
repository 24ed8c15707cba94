"""LinesTracker: the scalars of every run as lines of one file."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, ClassVar

from spec_core import Tracker
from spec_core.records import Availability

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class LinesTracker(Tracker):
    """Appends a line for each step to the file that ``track.lines`` names."""

    name: ClassVar[str] = "lines"
    api_version: ClassVar[int] = 1
    description: ClassVar[str] = "File that the scalars of each step are appended to."

    @classmethod
    def probe(cls) -> Availability:
        """K1: no client is needed."""
        return Availability(ok=True)

    def __init__(self, value: str, folder: Path) -> None:
        """K4: the run keeps its id in its directory."""
        super().__init__(value, folder)
        id_file = folder / ".lines-id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        self._run = id_file.read_text()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """K3: one line, which says whose it is."""
        with open(self.value, "a", encoding="utf-8") as file:
            file.write(json.dumps({"run": self._run, "step": step, **scalars}) + "\n")

    def close(self) -> None:
        """K5: nothing is buffered."""
