"""Check or correct what a process inherits: standard streams, working directory, COLUMNS, ulimit -v."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_trainer.cli.last_resort import Leave

if TYPE_CHECKING:
    from cyclopts import App

_USABLE_COLUMNS = range(20, 1000)
"""Widths to which help is wrapped. Rich never ends if it wraps to 2 columns or pads to 2 · 10⁹."""
_COLUMNS = 80
_LEAST_ADDRESS_SPACE = 5 << 29
"""Bytes of address space that a command may need for its libraries; they reserve more than they use. With less, some
of them abort, or wait for threads that cannot start."""


def open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise the next files that the process opens would get their numbers, and prints would go into these files.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115


def prepare_help(app: App) -> None:
    """Let ``app`` print help in a usable width for any COLUMNS, and exit with 0 if the reader closes the pipe."""
    from rich.console import Console

    class HelpConsole(Console):
        def on_broken_pipe(self) -> None:
            """End the process as usual, but with code 0."""
            with suppress(SystemExit):
                super().on_broken_pipe()
            raise Leave(0)

    columns = os.environ.get("COLUMNS", "")
    unusable = columns.isdecimal() and (len(columns) > 4 or int(columns) not in _USABLE_COLUMNS)
    app.console = HelpConsole(width=_COLUMNS if unusable else None)


def check_working_directory() -> None:
    """Raise ConfigError if the working directory was removed; relative paths and child processes need one."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory was removed; change to one that is there") from error


def check_address_space() -> None:
    """Raise ConfigError if the address space is limited to less than libraries reserve."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
        raise ConfigError(
            f"the address space is limited to {limit >> 10} kB (ulimit -v), expected at least "
            f"{_LEAST_ADDRESS_SPACE >> 10} kB, which the libraries of a command reserve; raise or remove the limit"
        )
