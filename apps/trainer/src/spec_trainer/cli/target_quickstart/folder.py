"""QuickstartFolder has the files of ``quickstart --target``, from which a repeated call sees where to continue.

A round is what one budget buys: prompts, answers, training, figures. A call with a larger budget adds a round, which
trains the draft of the round before. Each file is written atomically, and a stage has ended if ``times.json`` has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from spec_core import foreign_errors
from spec_core.errors import ArtifactError
from spec_core.foreign import read_bytes
from spec_trainer.base.disk import check_writable, locked_folder, write_atomically
from spec_trainer.data.sources import read_files

_LEAST_MORE_S = 20.0
"""A budget that is larger by less adds no round."""


class Round:
    """The files of one round."""

    def __init__(self, root: Path) -> None:
        """Set the path of each file in ``root``."""
        self.root = root
        self.begun = root / "round.json"
        """File with the seconds of the round."""
        self.times = root / "times.json"
        """File with the seconds that each stage took."""
        self.unended = root / "unended.json"
        """File with the seconds of interrupted stages, and of the stage that is under way."""
        self.questions = root / "questions.jsonl"
        """File of the questions that the target writes, while it writes them."""
        self.prompts = root / "prompts.jsonl"
        """File of the prompts to answer in this round, those first that the round before has left."""
        self.prompt_counts = root / "prompts.json"
        """File with where the prompts come from, and how many were left out."""
        self.answer_settings = root / "answers.json"
        """File with the settings of the answers."""
        self.answers = root / "answers.jsonl"
        """File of the target's answers."""
        self.training = root / "training.jsonl"
        """File of the answers of this and all earlier rounds."""
        self.recipe = root / "recipe.json"
        """File with the settings of the training run, and the time of its steps."""
        self.run = root / "run"
        """Run directory."""
        self.figures = root / "evaluation.json"
        """File with the figures on held-out prompts."""

    @property
    def draft(self) -> Path:
        """The folder of the trained draft."""
        return self.run / "draft"

    @property
    def budget_s(self) -> float:
        """The seconds of the round."""
        return float(read_document(self.begun)["budget_s"])

    @property
    def spent(self) -> dict[str, float]:
        """The seconds of each stage that has ended."""
        return read_document(self.times) if self.times.exists() else {}

    @property
    def interrupted_s(self) -> float:
        """The seconds of stages that were killed or stopped, and so did not end."""
        return self._unended()[0]

    def note_under_way(self, seconds: float) -> None:
        """Note how long the stage that is under way has taken so far."""
        self._write_unended(self.interrupted_s, seconds)

    def charge_interrupted(self) -> None:
        """Charge the time of the stage that an earlier call of the command did not end."""
        self._write_unended(sum(self._unended()), 0.0)

    def _unended(self) -> tuple[float, float]:
        if not self.unended.exists():
            return 0.0, 0.0
        document = read_document(self.unended)
        return float(document["interrupted_s"]), float(document["under_way_s"])

    def _write_unended(self, interrupted_s: float, under_way_s: float) -> None:
        document = {"interrupted_s": round(interrupted_s, 1), "under_way_s": round(under_way_s, 1)}
        write_document(self.unended, document)

    def end_stage(self, stage: str, seconds: float) -> None:
        """Note that a stage has ended."""
        write_document(self.times, {**self.spent, stage: round(seconds, 1)})


class QuickstartFolder:
    """The files of ``quickstart --target``."""

    def __init__(self, root: Path) -> None:
        """Set the path of each file in ``root``; create nothing."""
        self.root = root
        self._settings = root / "quickstart.json"
        self.held_out = root / "held_out.jsonl"
        """File of the prompts of the figures, on which nothing is trained."""
        self.cost = root / "breakdown.json"
        """File with what a token costs without a draft and a round with one."""
        self.plain = root / "without_draft.json"
        """File with the answers to the held-out prompts without a draft, of an engine that starts slowly."""
        self.summary = root / "summary.json"
        """File with the figures of the last round."""
        self.report = root / "report.html"
        """Page with these figures."""

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ArtifactError if the folder cannot be written to, or was begun with other ``settings``."""
        check_writable(self.root)
        if self._settings.exists():
            there = read_document(self._settings)
            different = [name for name, value in settings.items() if there.get(name) != value]
            if different:
                raise ArtifactError(
                    f"output {self.root} was begun with another {' and '.join(different)}; choose another output, or "
                    "remove it to start anew"
                )
        elif self.root.exists() and any(not path.name.startswith(".lock") for path in self.root.iterdir()):
            raise ArtifactError(f"output {self.root} is not empty and is no quickstart's; choose another")

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder during the ``with`` block. A UsageError in the first stage empties it again."""
        return locked_folder(self.root, "a quickstart", "round-1/times.json")

    def open(self, settings: Mapping[str, Any]) -> None:
        """Write ``settings`` if the folder is new."""
        if not self._settings.exists():
            write_document(self._settings, dict(settings))

    @property
    def rounds(self) -> list[Round]:
        """All rounds that were begun, in their order."""
        found: list[Round] = []
        while (one := self._round(len(found) + 1)).begun.exists():
            found.append(one)
        return found

    def next_round(self, budget_s: float, last_stage: str) -> Round | None:
        """Return the unfinished round, or a new one if enough of ``budget_s`` is left for it, or else None.

        An unfinished round also gets the seconds by which the budget has grown.
        """
        rounds = self.rounds
        one = rounds.pop() if rounds and last_stage not in rounds[-1].spent else None
        given_s = sum(past.budget_s for past in rounds)
        if one is not None:
            if budget_s - given_s > one.budget_s:
                write_document(one.begun, {"budget_s": budget_s - given_s})
            return one
        if rounds and budget_s - given_s < _LEAST_MORE_S:
            return None
        new = self._round(len(rounds) + 1)
        new.root.mkdir(exist_ok=True)
        write_document(new.begun, {"budget_s": budget_s - given_s})
        return new

    def _round(self, number: int) -> Round:
        return Round(self.root / f"round-{number}")


def write_document(file: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    write_atomically(file, json.dumps(document, indent=2, default=str) + "\n")


def read_document(file: Path) -> dict[str, Any]:
    """Return a JSON object. Raise ArtifactError if the file is damaged."""
    with foreign_errors(ArtifactError, f"{file} is damaged; remove its folder to start anew"):
        return dict(json.loads(read_bytes(file, ArtifactError)))


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON object in each line."""
    write_atomically(file, "".join(json.dumps(row, default=str) + "\n" for row in rows))


def read_all(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that ``write_rows`` wrote; none if it does not exist."""
    return [dict(row.content) for row in read_files([file])] if file.exists() and file.stat().st_size else []
