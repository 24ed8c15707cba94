"""Make a process independent of what its caller closed, removed or set: streams, working directory, COLUMNS."""

from __future__ import annotations

import os
import sys

from spec_core.errors import ConfigError

_FEWEST_COLUMNS = 20
"""Smallest width in columns to which text is wrapped; a table in fewer would never end."""


def open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise the next file that the process opens would get their numbers, and every print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115


def ignore_narrow_columns() -> None:
    """Unset COLUMNS if it is no usable width of a terminal."""
    columns = os.environ.get("COLUMNS", "")
    if not (columns.isdecimal() and len(columns) < 6 and int(columns) >= _FEWEST_COLUMNS):
        os.environ.pop("COLUMNS", None)


def check_working_directory() -> None:
    """Raise ConfigError if the working directory was removed; relative paths and child processes need one."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory was removed; change to one that is there") from error
