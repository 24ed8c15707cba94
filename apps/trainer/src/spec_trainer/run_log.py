"""RunLog: the record of each step. Every rank notes the samples that it has trained; rank 0 logs the rest."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from spec_trainer.metrics import MetricsLog, StepLines, build_trackers, drop_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_trainer.draft_trainer import BatchShare
    from spec_trainer.run_spec import RunSpec


class RunLog:
    """Writes ``logs/trained-RANK.jsonl`` of each data-parallel rank; on process 0 metrics.jsonl and trackers too."""

    def __init__(
        self, run: RunSpec, process: int, done_steps: int, show: Callable[[dict[str, Any]], None]
    ) -> None:
        """``show`` takes the metrics of each step to the user; only process 0 calls it."""
        self._show = show
        self._reports = process == 0
        self._trained: StepLines | None = None
        logs, ranks = run.directory.logs, run.schedule.settings.data_parallel_ranks
        with ExitStack() as stack:
            if ranks.index(ranks[process]) == process:  # the first of those that train the same samples
                file = logs / f"trained-{ranks[process]}.jsonl"
                self._trained = stack.enter_context(StepLines(file, done_steps))
            if self._reports:
                for file in logs.glob("trained-*.jsonl"):
                    if int(file.stem.removeprefix("trained-")) not in ranks:  # the run had more ranks before
                        drop_after(file, done_steps)
                trackers = build_trackers(run.config.track, run.directory)
                self._metrics = stack.enter_context(MetricsLog(run.directory.metrics, done_steps, trackers))
            self._stack = stack.pop_all()

    def trained(self, step: int, share: BatchShare) -> None:
        """Write which samples this rank's part of a step held: every sample is trained exactly once."""
        samples = [span.sample_id for batch in share.micro_batches for span in batch.spans]
        if self._trained is not None:
            self._trained.write({"step": step, "samples": samples})

    def step(self, record: dict[str, Any]) -> None:
        """Write a step's metrics and show them; nothing on other processes than 0."""
        if self._reports:
            self._metrics.log(record)
            self._show(record)

    def __enter__(self) -> Self:
        """Return the log itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close every file and tracker."""
        self._stack.close()
