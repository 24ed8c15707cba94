"""DecodedFolder: what the engine of a run has decoded, cycle by cycle, and the draft that it serves.

``cycle-C.jsonl`` are the answers that cycle C trains on, in rows that any run takes as data; ``cycle-C.json`` are the
engine's figures. ``held_out.jsonl`` are the first answers to the held-out prompts. A file is there whole or not at
all, and the answers of a cycle come last: with them the cycle is decoded, and never is again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from spec_core.config import Config
from spec_core.errors import ArtifactError
from spec_core.foreign import foreign_errors, read_bytes
from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.disk import remove, write_atomically
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.records import CycleFigures, read_figures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spec_core.records import Generation
    from spec_trainer.config import AnyRunConfig

HELD_OUT = "held_out"

_Token = Annotated[int, Field(ge=0, lt=2**31)]


class _AnswerRow(Config):
    """A row of ``_row``."""

    input_ids: Annotated[list[_Token], Field(min_length=1)]
    loss_mask: list[Literal[0, 1]]
    guess_place: list[_Token]

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        if not len(self.input_ids) == len(self.loss_mask) == len(self.guess_place):
            raise ValueError("input_ids, loss_mask and guess_place differ in length")
        return self


class DecodedFolder:
    """The files below ``decoded/`` of a run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        """Name the folder, and make it."""
        self._directory, self._root = directory, directory.decoded
        self._root.mkdir(exist_ok=True)

    def draft(self, version: int) -> Path:
        """Return the folder of the draft of that version, which may not exist."""
        return self._directory.served_draft(version)

    def keep_only(self, *versions: int) -> None:
        """Remove the drafts of other versions."""
        kept = [self.draft(version) for version in versions]
        for folder in self._root.glob("draft-*"):
            if folder not in kept:
                remove(folder)

    def remove_drafts_after(self, done_steps: int) -> None:
        """Remove the drafts of later steps, which are trained anew."""
        for folder in self._root.glob("draft-*"):
            version = folder.name.removeprefix("draft-")
            if not version.isdecimal() or int(version) > done_steps:
                remove(folder)

    def has(self, cycle: int) -> bool:
        """Return whether the answers of a cycle are there."""
        return self._answers(f"cycle-{cycle}").exists()

    def has_held_out(self) -> bool:
        """Return whether there are answers to the held-out prompts."""
        return self._answers(HELD_OUT).exists()

    def write_answers(
        self, name: str, prompts: Sequence[Sequence[int]], answers: Sequence[Generation]
    ) -> None:
        """Write the rows of ``cycle-C`` or ``held_out``, one for each answer."""
        rows = [_row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        write_atomically(self._answers(name), "".join(json.dumps(row) + "\n" for row in rows))

    def write_figures(self, cycle: int, figures: Mapping[str, Any]) -> None:
        """Write what the engine has counted at the beginning of a cycle, or at the end of the run."""
        write_atomically(self._figures(cycle), json.dumps(figures, indent=2) + "\n")

    def figures(self, cycle: int) -> dict[str, Any] | None:
        """Return these figures, or None if there are none."""
        file = self._figures(cycle)
        if not file.exists():
            return None
        with foreign_errors(ArtifactError, f"{file} is damaged; delete it and the answers of that cycle"):
            return read_figures(file, CycleFigures)

    def dataset(self, cycle: int, on_policy: bool) -> Dataset:
        """Return the answers of a cycle to train on, with their guess places if ``on_policy``.

        Held out are the first answers to the held-out prompts, the same in every cycle.
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
                    guess_place=np.array(row.guess_place, dtype=np.int32) if on_policy else None,
                )
                for number, row in enumerate(rows, start=first_id)
            )

    def _answers(self, name: str) -> Path:
        return self._root / f"{name}.jsonl"

    def _figures(self, cycle: int) -> Path:
        return self._root / f"cycle-{cycle}.json"


def cycle_dataset(config: AnyRunConfig, cycle: int) -> Dataset:
    """Return the answers that a cycle of the run trains on, in any process of it."""
    return DecodedFolder(RunDirectory(config.output)).dataset(cycle, config.decode.on_policy)


def _row(prompt: Sequence[int], answer: Generation) -> dict[str, list[int]]:
    places = answer.guess_places or (0,) * len(answer.token_ids)
    return {
        "input_ids": [*prompt, *answer.token_ids],
        "loss_mask": [0] * len(prompt) + [1] * len(answer.token_ids),
        "guess_place": [0] * len(prompt) + list(places),
    }
