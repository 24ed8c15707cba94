"""KeptQuestions has the questions that the target has written in a round; a killed call loses none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_trainer.base.disk import write_atomically
from spec_trainer.cli.target_quickstart.folder import read_all
from spec_trainer.cli.target_quickstart.prompts import THE_TARGET, PromptCounts
from spec_trainer.run.metrics import StepLines

Row = dict[str, Any]


class KeptQuestions:
    """A file with a line for each question: its row, and the counts with which it came."""

    def __init__(self, file: Path, position: int) -> None:
        """Read the questions of an earlier call, if there was one. ``position``: samples of all earlier rounds."""
        self._file = file
        if file.exists():
            text = file.read_text(encoding="utf-8")
            write_atomically(file, text[: text.rfind("\n") + 1])  # without a line that a kill has cut short
        lines = read_all(file)
        self.rows: list[Row] = [line["row"] for line in lines]
        self.counts = (
            PromptCounts(**lines[-1]["counts"])
            if lines
            else PromptCounts(source=THE_TARGET, position=position)
        )
        """The counts so far, which change as samples are drawn."""

    def add(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield each of ``rows`` after it was written. Raise RunError if the disk is full."""
        with StepLines(self._file) as lines:
            for row in rows:
                lines.write({"row": row, "counts": self.counts.as_document()})
                yield row
