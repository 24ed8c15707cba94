"""Write metrics.jsonl and the optional trackers: one row per optimizer step, floats in full."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spec_trainer.disk import not_written, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TakesSteps(Protocol):
    """A tracker, or what stands for one."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of a step."""

    def close(self) -> None:
        """Send what it has."""


class StepLines(AbstractContextManager["StepLines"]):
    """A file with one JSON row per step.

    Opened at step N, it first drops the rows that a crashed run wrote after N, so that it holds every step once.
    """

    def __init__(self, file: Path, done_steps: int) -> None:
        """Open ``file``, cut back to the first ``done_steps`` steps."""
        drop_after(file, done_steps)
        self._file = file.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        """Write a row. Raise RunError where the disk is full."""
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            file = Path(self._file.name)
            raise not_written(file, file.parent, error) from error

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        with suppress(OSError):  # the disk is full, and ``write`` has raised it
            self._file.close()


def drop_after(file: Path, step: int) -> None:
    """Remove the rows of later steps."""
    if file.exists():
        write_atomically(file, "".join(line for line in _lines(file) if json.loads(line)["step"] <= step))


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """metrics.jsonl and the trackers of one run."""

    def __init__(self, file: Path, done_steps: int, trackers: Sequence[TakesSteps]) -> None:
        """Write to ``file``, cut back to ``done_steps`` steps, and to ``trackers``."""
        self._lines = StepLines(file, done_steps)
        self._trackers = trackers

    def log(self, row: dict[str, Any]) -> None:
        """Write a row, and give its scalars to the trackers."""
        self._lines.write(row)
        scalars = dict(_scalars(row))
        for tracker in self._trackers:
            tracker.log(row["step"], scalars)

    def __exit__(self, *exc: object) -> None:
        """Close the file and the trackers."""
        with ExitStack() as stack:
            stack.enter_context(self._lines)
            for tracker in self._trackers:
                stack.callback(tracker.close)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return every row of metrics.jsonl."""
    return [json.loads(line) for line in _lines(file)]


def _lines(file: Path) -> list[str]:
    """Return the whole lines of a file: a crash may have cut the last one short."""
    if not file.exists():
        return []
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _scalars(row: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the numbers of a row by name; a list (one per draft position) becomes name/0, name/1, …."""
    flat: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, list):
            flat += [(f"{name}/{index}", item) for index, item in enumerate(value)]
        elif isinstance(value, int | float) and name != "step":
            flat.append((name, value))
    return flat
