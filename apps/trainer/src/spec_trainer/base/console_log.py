"""Log to standard error, with unprintable characters escaped."""

from __future__ import annotations

import logging
import sys

from spec_core.plugins import packages
from spec_core.wording import printable


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Log to stderr: WARNING and above for every package, INFO and above for this project and plugins."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    show_from(logging.INFO)


def show_from(level: int) -> None:
    """Set the log level of this project's packages and its plugins to ``level``."""
    for package in {"spec_trainer", "spec_processes", "spec_kit"} | packages():
        logger = logging.getLogger(package)
        if logger.level != level:  # the setter clears the caches of all loggers
            logger.setLevel(level)
