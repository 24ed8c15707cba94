"""RunLog writes the metrics of each step on rank 0, and the sample ids of each step on every rank."""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from spec_trainer.run.metrics import StepLines, drop_after
from spec_trainer.run.records import MeasurementRow, ReplacementRow, StepRow, TrainedRow, VersionRow
from spec_trainer.run.trackers import build_trackers

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_trainer.run.directory import RunDirectory
    from spec_trainer.run.draft_trainer import BatchShare
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.run.trackers import GuardedTracker

log = logging.getLogger(__name__)


def cut_records(directory: RunDirectory, done_steps: int) -> None:
    """Remove the rows of steps after ``done_steps`` from a run's logs, because these steps are repeated.

    The run resumes after ``done_steps`` steps. If the logs lack rows of earlier steps, log a warning.
    """
    metrics = drop_after(directory.metrics, done_steps, StepRow)
    noted = Counter[int]()
    for file in directory.logs.glob("trained-*.jsonl"):
        for step, row in drop_after(file, done_steps, TrainedRow).items():
            noted[step] += len(row["samples"])
    drop_after(directory.measurements, done_steps, MeasurementRow)
    drop_after(directory.versions, done_steps, VersionRow)
    drop_after(directory.replacements, math.inf, ReplacementRow)
    lacking = {
        directory.metrics: done_steps - len(metrics),
        directory.logs / "trained-*.jsonl": sum(
            noted[step] < metrics.get(step, {}).get("samples", 1) for step in range(1, done_steps + 1)
        ),
    }
    for name, count in lacking.items():
        if count:
            log.warning("%s lacks rows of %d of the %d steps that are done", name, count, done_steps)


class RunLog:
    """Writes ``trained-RANK.jsonl`` of its data-parallel rank; on process 0 also metrics and trackers."""

    def __init__(
        self,
        run: RunSpec,
        process: int,
        show: Callable[[dict[str, Any]], None],
        trained: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Open the files. ``show`` displays the metrics of each step to the user; only process 0 calls it.

        ``trained``: called with each row of ``trained-RANK.jsonl`` if this rank cannot access the run
        directory; else None.
        """
        self._show = show
        self._reports = process == 0
        self._trackers: list[GuardedTracker] = []
        self._write_trained: Callable[[dict[str, Any]], None] | None = None
        logs = run.directory.logs
        ranks = run.schedule.settings.data_parallel_ranks
        with ExitStack() as stack:
            if ranks.index(ranks[process]) == process:  # the first rank that trains these samples
                self._write_trained = trained
                if trained is None:
                    file = logs / f"trained-{ranks[process]}.jsonl"
                    self._write_trained = stack.enter_context(StepLines(file)).write
            if self._reports:
                self._trackers = build_trackers(run.config.track, run.directory)
                self._metrics = stack.enter_context(StepLines(run.directory.metrics))
                for tracker in self._trackers:
                    stack.callback(tracker.close)
            self._stack = stack.pop_all()

    def trained(self, step: int, share: BatchShare) -> None:
        """Write the ids of the samples on which this rank trained in a step."""
        samples = [span.sample_id for batch in share.micro_batches for span in batch.spans]
        if self._write_trained is not None:
            self._write_trained({"step": step, "samples": samples})

    def step(self, record: dict[str, Any]) -> None:
        """Write and show a step's metrics, and give its numbers to the trackers, on process 0 only."""
        if self._reports:
            self._metrics.write(record)
            scalars = _scalars(record)
            for tracker in self._trackers:
                tracker.log(record["step"], scalars)
            self._show(record)

    def close_trackers(self) -> dict[str, str]:
        """Close the trackers; return name -> first failure of each tracker that failed."""
        for tracker in self._trackers:
            tracker.close()
        return {tracker.name: tracker.failure for tracker in self._trackers if tracker.failure}

    def __enter__(self) -> Self:
        """Return this log."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close all files and trackers."""
        self._stack.close()


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name; a list (one per draft position) becomes name/0, name/1, …."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, list):
            flat |= {f"{name}/{index}": item for index, item in enumerate(value)}
        elif isinstance(value, int | float) and name != "step":
            flat[name] = value
    return flat
