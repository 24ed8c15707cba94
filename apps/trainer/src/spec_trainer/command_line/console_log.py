"""Log records of a command on standard error, each of printable characters."""

from __future__ import annotations

import logging
import sys

from spec_core.plugins import packages
from spec_core.wording import printable


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Show warnings of every package, and what this project's and its plugins' say from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    show_from(logging.INFO)


def show_from(level: int) -> None:
    """Show what this project and its plugins say from ``level`` on."""
    for package in {"spec_trainer", "spec_processes", "spec_kit"} | packages():
        logging.getLogger(package).setLevel(level)
