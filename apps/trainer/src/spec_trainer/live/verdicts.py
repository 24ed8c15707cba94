"""Read the verdicts of a run of ``spec-trainer follow``, and describe them as text.

A verdict is one comparison of drafts: its time, the acceptance lengths, and which draft was pushed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from spec_core.errors import ArtifactError
from spec_core.wording import counted
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.metrics import StepLines
from spec_trainer.run.records import VersionRow, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from spec_core import TargetSpec
    from spec_trainer.run.spec import RunSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedVersion:
    """The draft that the servers serve."""

    step: int
    """Number of steps after which the draft was exported; 0 for the start draft."""
    version: int | None
    """Version number of the draft on the servers; None before the first push."""


def last_served(spec: RunSpec) -> ServedVersion:
    """Return the draft that was pushed last, or the start draft if the pushed draft's folder is gone."""
    rows = read_records(spec.directory.versions, VersionRow)
    if rows and spec.directory.served_draft(rows[-1]["served"]).exists():
        return ServedVersion(rows[-1]["served"], rows[-1]["version"])
    return ServedVersion(0, None)


def note_verdict(spec: RunSpec, row: Mapping[str, Any]) -> None:
    """Append a verdict to ``versions.jsonl``, and log it."""
    with StepLines(spec.directory.versions) as lines:
        lines.write(row)
    log.info(
        "verdict at step %d on %d held-out requests: tau %.2f, served draft %.2f, start draft %.2f; it saves %.1f %% "
        "(by chance up to %.1f %%); servers have step %d",
        row["step"], row["held_out"], row["acceptance_length"], row["acceptance_length_served"],
        row["acceptance_length_start"], 100 * row["saved"], 100 * row["chance"], row["served"],
    )  # fmt: skip


def read_verdicts(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``versions.jsonl``, oldest first. Raise ArtifactError if unreadable."""
    directory = RunDirectory(folder)
    if not directory.config.exists():
        raise ArtifactError(f"{folder} is no run directory; name the output of spec-trainer follow")
    return read_records(directory.versions, VersionRow)


def verdict_lines(verdicts: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a line of text for each verdict, and one for each label of its requests."""
    for row in verdicts:
        pushed = row["served"] != row["parent"]
        version = "none yet" if row.get("version") is None else f"version {row['version']}"
        parts = [
            f"{datetime.fromtimestamp(row.get('time', 0.0)):%Y-%m-%d %H:%M:%S}",
            f"{'pushed' if pushed else 'kept'}: {version}, of step {row['served']}",
            f"parent: step {row['parent']}" if pushed else f"not pushed: step {row['step']}",
            f"requests {row.get('oldest_request', 0)} to {row['requests']}",
            f"tau {row['acceptance_length']:.2f} (served {row['acceptance_length_served']:.2f}, start "
            f"{row['acceptance_length_start']:.2f})",
            f"saves {row['saved']:.1%}, by chance {row['chance']:.1%}",
        ]
        yield "  ".join(parts)
        for label, one in row.get("labels", {}).items():
            yield (
                f"  {label}: tau {one['acceptance_length']:.2f} (served {one['acceptance_length_served']:.2f}, start "
                f"{one['acceptance_length_start']:.2f}) on {counted(one['held_out'], 'request')}"
            )


def first_target(spec: RunSpec) -> TargetSpec:
    """Return the run's target, with the digest that its files had at the run's first verdict."""
    rows = read_records(spec.directory.versions, VersionRow)
    digest = rows[0].get("target") if rows else None
    return replace(spec.target, digest=digest or spec.target.digest)
