"""Read and write files of JSON rows, such as metrics.jsonl: a row per optimizer step, floats at full precision."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from spec_trainer.base.disk import not_written, write_atomically
from spec_trainer.run.records import Row, StepRow, read_records, whole_rows

log = logging.getLogger(__name__)


class StepLines(AbstractContextManager["StepLines"]):
    """Appends one JSON row per step to a file."""

    def __init__(self, file: Path) -> None:
        """Open ``file`` for appending."""
        self._file = file.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        """Write a row. Raise RunError if the disk is full."""
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            file = Path(self._file.name)
            raise not_written(file, file.parent, error) from error

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        with suppress(OSError):  # the disk is full, and ``write`` has raised it
            self._file.close()


def drop_after(file: Path, step: float, kind: type[Row]) -> dict[int, dict[str, Any]]:
    """Remove from ``file`` the rows of later steps than ``step`` and all invalid rows; return the others.

    The result maps each remaining step to its row. A row is invalid if ``kind``, the type of rows, does not
    accept it. Invalid rows only cause a warning, because no run depends on them.
    """
    if not file.exists():
        file.unlink(missing_ok=True)  # a broken link: rows would go to its target
        return {}
    rows, damaged = whole_rows(file, kind)
    if damaged:
        log.warning("%s; the run goes on without %d of its rows", damaged[0], len(damaged))
    retained = [(line, row) for line, row in rows if row["step"] <= step]
    write_atomically(file, "".join(line for line, _ in retained))
    return {row["step"]: row for _, row in retained}


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return every row of metrics.jsonl."""
    return read_records(file, StepRow)
