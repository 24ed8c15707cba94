"""This module has the flags --quiet and --verbose of every command, and --json of many commands.

It imports little, for a fast start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from spec_core.errors import ConfigError

Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """Flags for how much a command logs."""

    quiet: Annotated[
        bool,
        Parameter(negative="", help="Warnings and errors alone: no progress, no notes.", show_default=False),
    ] = False
    verbose: Annotated[
        bool, Parameter(negative="", help="What helps to find a fault, besides.", show_default=False)
    ] = False

    def __post_init__(self) -> None:
        """Raise ConfigError if both --quiet and --verbose are given."""
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose exclude each other; remove one")

    @property
    def level(self) -> int:
        """The lowest level of log records that are shown."""
        return logging.WARNING if self.quiet else logging.DEBUG if self.verbose else logging.INFO
