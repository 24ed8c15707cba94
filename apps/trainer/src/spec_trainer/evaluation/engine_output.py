"""Keeps what engines write away from the command's own output: stdout is one document, stderr a few lines."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

log = logging.getLogger(__name__)

_ENGINES = "spec_trainer.engines"
"""The logger below which engines also repeat what their processes say."""


@contextmanager
def engine_output_kept() -> Iterator[None]:
    """File descriptor 1 and engines' log records, warnings excepted, go to a file. It is named when a run fails, and
    removed otherwise."""
    descriptor, name = tempfile.mkstemp(prefix="spec-trainer-evaluate-", suffix=".log")
    with os.fdopen(descriptor, "w", buffering=1, encoding="utf-8") as file:
        try:
            with _stdout_to(file), _records_to(file):
                yield
        except RunError:
            log.error("what the engine has said is in %s", name)
            raise
        except BaseException:
            Path(name).unlink()
            raise
    Path(name).unlink()


@contextmanager
def _stdout_to(file: TextIO) -> Iterator[None]:
    """Python's stdout and the descriptor, which processes that are started meanwhile inherit."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        with redirect_stdout(file):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _records_to(file: TextIO) -> Iterator[None]:
    logger, handler = logging.getLogger(_ENGINES), _WarningsPassOn(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


class _WarningsPassOn(logging.StreamHandler["TextIO"]):
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.levelno >= logging.WARNING:
            log.handle(record)
