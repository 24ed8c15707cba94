"""Read and validate the JSON rows and figures of a run directory, which may be untrusted.

A value without a declared field must be a number, a string, a list of numbers, or null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from spec_core import foreign_errors
from spec_core.errors import ArtifactError
from spec_core.foreign import check_regular, read_bytes
from spec_kit.live_traffic.live_requests import Label

_LINE_BYTES = 1 << 20
"""Largest number of bytes of one row; a step's row has a few hundred."""
_FILE_BYTES = 1 << 32
"""Largest number of bytes of a file of rows; a file with a million steps has some hundred million."""

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Number = bool | int | float
_Plain = _Number | str | list[_Number] | None


class Figures(pydantic.BaseModel):
    """Named figures; fields that are not declared are allowed."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", frozen=True)
    __pydantic_extra__: dict[str, _Plain]


class Row(Figures):
    """A row of a file that has one row for each optimizer step."""

    step: _Count


class PushFigures(Figures):
    """Figures of a push, which the rows of some steps have."""

    push_version: _Count = 0
    push_committed: bool = False
    push_reverted: bool = False
    push_s: float = 0.0
    push_wait_s: float = 0.0
    push_acceptance_before: float = 0.0
    push_acceptance_after: float = 0.0


class StepRow(Row, PushFigures):
    """A row of metrics.jsonl: the figures of one optimizer step."""

    loss: float
    lr: float = 0.0
    acceptance_length: float = 0.0
    accuracy: list[float] = []
    eval_loss: float = 0.0
    eval_lr: float = 0.0
    eval_acceptance_length: float = 0.0
    tokens: _Count = 0
    samples: _Count = 0
    serve_wait_s: float = 0.0


class LabelFigures(Figures):
    """Figures of the held-out requests with one label."""

    held_out: _Count
    acceptance_length: float
    acceptance_length_served: float
    acceptance_length_start: float


class VersionRow(Row):
    """A row of versions.jsonl: one draft that was compared with the served draft on live requests."""

    parent: _Count
    requests: _Count
    held_out: _Count
    acceptance_length: float
    acceptance_length_served: float
    acceptance_length_start: float
    saved: float
    chance: float
    served: _Count
    version: _Count | None = None
    time: Annotated[float, Field(ge=0, le=1e11)] = 0.0
    oldest_request: _Count = 0
    target: str = ""
    labels: Annotated[dict[Label, LabelFigures], Field(max_length=64)] = {}


def length_of_served(verdict: Mapping[str, Any]) -> str:
    """Return the name of the field with the acceptance length of the draft that servers have since a verdict.

    ``acceptance_length_served`` is of the draft that they had before it. ``verdict``: a row of versions.jsonl.
    """
    if verdict["served"] == verdict["step"]:
        return "acceptance_length"
    has_stayed = verdict["served"] == verdict["parent"]
    return "acceptance_length_served" if has_stayed else "acceptance_length_start"


class MeasurementRow(Row):
    """A row of measurements.jsonl: acceptance length and speed of one draft during training."""

    serving_acceptance_length: float
    serving_acceptance_length_per_request: float = 0.0
    serving_tokens_per_s: float = 0.0
    serving_tokens: _Count = 0
    serving_s: float = 0.0


class ReplacementRow(Row):
    """A row of replacements.jsonl: one failed engine that the run has replaced."""

    time: Annotated[float, Field(ge=0, le=1e11)]
    worker: str
    cause: str


class TrainedRow(Row):
    """A row of trained-R.jsonl: the ids of the samples on which rank R trained in one step."""

    samples: list[_Count]


class CycleFigures(Figures):
    """Figures of one cycle of a run with ``decode.every``."""

    cycle: _Count
    draft_version: _Count
    held_out_acceptance_length: float = 0.0
    decode_acceptance_length: float = 0.0
    decode_tokens: _Count = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0


class SampleCounts(pydantic.BaseModel):
    """Numbers of samples and tokens of a run's data."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)

    kept: _Count
    held_out: _Count
    tokens: _Count
    supervised_tokens: _Count


class CardFigures(pydantic.BaseModel):
    """Fields of summary.json that a draft's model card has."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)

    steps: _Count
    tokens: _Count = 0
    samples: SampleCounts | None = None
    acceptance_length: float | None = None
    acceptance_per_position: list[float] = []
    eval_acceptance_length: float | None = None
    eval_acceptance_length_rounds: float | None = None
    eval_acceptance_per_position: list[float] = []
    eval_accuracy: list[float] = []


class KeptSummary(pydantic.BaseModel):
    """Fields of an existing summary.json that are copied to the new one if the run was already complete."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)

    steps: _Count = 0
    tokens: _Count = 0
    wall_s: float = 0.0
    time_s: dict[str, float] = {}
    acceptance_length: float | None = None
    acceptance_length_before: float | None = None
    cycles: list[CycleFigures] = []
    last_pushes: list[PushFigures] = []


def read_records(file: Path, kind: type[Row]) -> list[dict[str, Any]]:
    """Return every row of ``file``, or no row if it does not exist. Raise ArtifactError for a damaged row."""
    rows, damaged = whole_rows(file, kind)
    if damaged:
        raise damaged[0]
    return [row for _, row in rows]


def whole_rows(file: Path, kind: type[Row]) -> tuple[list[tuple[str, dict[str, Any]]], list[ArtifactError]]:
    """Return the text and the parsed row of each valid line of a file, and an error for each damaged line.

    A last line without line break, which a crash may have cut short, is ignored. Raise ArtifactError if ``file`` is
    no regular file or too large.
    """
    rows: list[tuple[str, dict[str, Any]]] = []
    damaged: list[ArtifactError] = []
    if file.exists() or file.is_symlink():
        check_regular(file, ArtifactError, _FILE_BYTES)
        for number, line in enumerate(_lines(file), 1):
            try:
                with foreign_errors(ArtifactError, f"{file}:{number} is damaged; remove the line"):
                    kind.model_validate_json(line)
                    rows.append((line.decode(), json.loads(line)))
            except ArtifactError as error:
                damaged.append(error)
    return rows, damaged


def _lines(file: Path) -> Iterator[bytes]:
    """Yield each complete line (with a line break), cut to ``_LINE_BYTES`` bytes if it is longer."""
    with file.open("rb") as stream:
        while line := stream.readline(_LINE_BYTES):
            end = line
            while len(end) == _LINE_BYTES and not end.endswith(b"\n"):
                end = stream.readline(_LINE_BYTES)
            if end.endswith(b"\n"):
                yield line


def read_figures(file: Path, kind: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return those fields of a JSON file that ``kind`` has. Raise ArtifactError if the file is damaged."""
    content = read_bytes(file, ArtifactError)
    with foreign_errors(ArtifactError, f"{file} is damaged"):
        known = kind.model_validate_json(content).model_dump(exclude_unset=True)
        return {name: value for name, value in json.loads(content).items() if name in known}
