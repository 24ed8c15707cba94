"""Redirect an engine's output to a file, to keep it out of the command's stdout and stderr."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

from spec_core import Engine
from spec_core.errors import RunError

log = logging.getLogger(__name__)


@contextmanager
def engine_output_kept(engine_type: type[Engine]) -> Iterator[None]:
    """Redirect file descriptor 1, and the engine's log records of INFO and above, to a temporary file.

    The engine's warnings are shown on stderr as well. If the ``with`` block raises a RunError, the file's name is
    logged; otherwise the file is removed.
    """
    descriptor, name = tempfile.mkstemp(prefix="spec-trainer-engine-", suffix=".log")
    with os.fdopen(descriptor, "w", buffering=1, encoding="utf-8") as file:
        try:
            with _stdout_to(file), _records_to(file, _loggers(engine_type)):
                yield
        except RunError:
            log.error("the engine's output is in %s", name)
            raise
        except BaseException:
            Path(name).unlink()
            raise
    Path(name).unlink()


@contextmanager
def _stdout_to(file: TextIO) -> Iterator[None]:
    """Redirect Python's stdout and file descriptor 1, which child processes inherit."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        with redirect_stdout(file):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _loggers(engine_type: type[Engine]) -> list[logging.Logger]:
    """Return the loggers to which an engine's plugin, and the packages of its base classes, log.

    An engine's modules log to children of these loggers. Lines that its processes print are logged to them,
    too.
    """
    modules = [
        base.__module__ for base in engine_type.__mro__ if issubclass(base, Engine) and base is not Engine
    ]
    return [logging.getLogger(name.rpartition(".")[0] or name) for name in modules]


@contextmanager
def _records_to(file: TextIO, loggers: Sequence[logging.Logger]) -> Iterator[None]:
    handler = _WarningsPassOn(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    with ExitStack() as stack:
        for logger in dict.fromkeys(loggers):
            stack.callback(_restore, logger, logger.level, logger.propagate, handler)
            logger.addHandler(handler)
            logger.propagate = False
            if logger.getEffectiveLevel() > logging.INFO:
                logger.setLevel(logging.INFO)
        yield


def _restore(logger: logging.Logger, level: int, propagate: bool, handler: logging.Handler) -> None:
    logger.removeHandler(handler)
    logger.propagate = propagate
    logger.setLevel(level)


class _WarningsPassOn(logging.StreamHandler["TextIO"]):
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.levelno >= logging.WARNING:
            log.handle(record)
