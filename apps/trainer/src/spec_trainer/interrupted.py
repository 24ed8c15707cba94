"""Interrupted: a run that stopped because somebody asked, after it had saved a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Interrupted(Exception):
    """The command line maps it to exit code 130."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"interrupted; saved {checkpoint}; the same command continues there")
