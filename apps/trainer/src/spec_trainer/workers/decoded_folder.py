"""DecodedFolder has the answers and figures of each cycle, and the draft that the engine serves.

``cycle-C.jsonl`` has the answers that cycle C trains on, as rows that any run accepts as data. ``cycle-C.json`` has
the engine's figures. ``held_out.jsonl`` has the first answers to the held-out prompts. Files are written atomically.
A cycle's answers are written last: once they exist, the cycle is not decoded again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from spec_core import Config, foreign_errors
from spec_core.errors import ArtifactError
from spec_core.foreign import read_bytes
from spec_core.records import Generation
from spec_trainer.base.disk import remove, write_atomically
from spec_trainer.configuration.run import AnyRunConfig
from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.records import CycleFigures, read_figures

HELD_OUT = "held_out"

_Token = Annotated[int, Field(ge=0, lt=2**31)]


class _AnswerRow(Config):
    """A row of a file of answers: the tokens of one prompt and its answer."""

    input_ids: Annotated[list[_Token], Field(min_length=1)]
    loss_mask: list[Literal[0, 1]]
    guess_depth: list[_Token]
    """Depth of the draft's guess of each token (``Supervision.guess_depth``)."""

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        if not len(self.input_ids) == len(self.loss_mask) == len(self.guess_depth):
            raise ValueError("input_ids, loss_mask and guess_depth differ in length")
        return self


class DecodedFolder:
    """Reads and writes the files in ``decoded/`` of a run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        """Create the folder ``decoded/`` if needed."""
        self._directory = directory
        self._root = directory.decoded
        self._root.mkdir(exist_ok=True)

    def draft(self, version: int) -> Path:
        """Return the path of a draft version's folder, whether or not the folder exists."""
        return self._directory.served_draft(version)

    def keep_only(self, *versions: int) -> None:
        """Remove the drafts of all versions except ``versions``."""
        retained = [self.draft(version) for version in versions]
        for folder in self._root.glob("draft-*"):
            if folder not in retained:
                remove(folder)

    def remove_drafts_after(self, done_steps: int) -> None:
        """Remove the drafts of steps after ``done_steps``, because these steps are trained again."""
        for folder in self._root.glob("draft-*"):
            version = folder.name.removeprefix("draft-")
            if not version.isdecimal() or int(version) > done_steps:
                remove(folder)

    def has(self, cycle: int) -> bool:
        """Return whether the answers of a cycle exist."""
        return self._answers(f"cycle-{cycle}").exists()

    def has_held_out(self) -> bool:
        """Return whether answers to the held-out prompts exist."""
        return self._answers(HELD_OUT).exists()

    def write_answers(
        self, name: str, prompts: Sequence[Sequence[int]], answers: Sequence[Generation]
    ) -> None:
        """Write one row for each answer into the file ``name``, which is ``cycle-C`` or ``held_out``."""
        rows = [_row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        write_atomically(self._answers(name), "".join(json.dumps(row) + "\n" for row in rows))

    def write_figures(self, cycle: int, figures: Mapping[str, Any]) -> None:
        """Write the engine's figures of a cycle.

        The figures of the draft that is served at the end of the run are written as the cycle after the last
        one.
        """
        write_atomically(self._figures(cycle), json.dumps(figures, indent=2) + "\n")

    def figures(self, cycle: int) -> dict[str, Any] | None:
        """Return the engine's figures of a cycle, or None if there are none."""
        file = self._figures(cycle)
        if not file.exists():
            return None
        with foreign_errors(ArtifactError, f"{file} is damaged; delete it and the answers of that cycle"):
            return read_figures(file, CycleFigures)

    def dataset(self, cycle: int, on_policy: bool) -> Dataset:
        """Return the answers on which a cycle trains, as a Dataset.

        With ``on_policy`` each sample has its ``Sample.guess_depth``. The held-out samples of every cycle are
        the answers to the held-out prompts in the first cycle, so that evaluations of different cycles can be
        compared.
        """
        train = self._read(f"cycle-{cycle}", 0, on_policy)
        held_out = self._read(HELD_OUT, len(train), on_policy=False) if self.has_held_out() else ()
        return Dataset(train, held_out, DataReport())

    def _read(self, name: str, first_id: int, on_policy: bool) -> tuple[Sample, ...]:
        file = self._answers(name)
        with foreign_errors(
            ArtifactError, f"{file} is damaged; delete it, and its prompts are answered anew"
        ):
            rows = map(_AnswerRow.model_validate_json, read_bytes(file, ArtifactError).splitlines())
            return tuple(
                Sample(
                    number,
                    np.array(row.input_ids, dtype=np.int32),
                    np.array(row.loss_mask, dtype=bool),
                    f"{file}:{number - first_id + 1}",
                    guess_depth=np.array(row.guess_depth, dtype=np.int32) if on_policy else None,
                )
                for number, row in enumerate(rows, start=first_id)
            )

    def _answers(self, name: str) -> Path:
        return self._root / f"{name}.jsonl"

    def _figures(self, cycle: int) -> Path:
        return self._root / f"cycle-{cycle}.json"


def cycle_dataset(config: AnyRunConfig, cycle: int) -> Dataset:
    """Return the answers that a cycle of a run trains on; any process of the run may call this."""
    return DecodedFolder(RunDirectory(config.output)).dataset(cycle, config.decode.on_policy)


def _row(prompt: Sequence[int], answer: Generation) -> dict[str, list[int]]:
    guess_depths = answer.guess_depths or (0,) * len(answer.token_ids)
    return {
        "input_ids": [*prompt, *answer.token_ids],
        "loss_mask": [0] * len(prompt) + [1] * len(answer.token_ids),
        "guess_depth": [0] * len(prompt) + list(guess_depths),
    }
