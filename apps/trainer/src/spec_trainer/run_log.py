"""RunLog: what the rank that reports says about each step; the other ranks say nothing."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from spec_trainer.metrics import MetricsLog, build_trackers
from spec_trainer.progress import StepProgress

if TYPE_CHECKING:
    from spec_trainer.resolve import ResolvedRun


class RunLog:
    """metrics.jsonl, trackers and the progress line of rank 0."""

    def __init__(self, run: ResolvedRun, done_steps: int, reports: bool) -> None:
        self._stack = ExitStack()
        self._metrics: MetricsLog | None = None
        if reports:
            trackers = build_trackers(run.config.track, run.directory)
            self._metrics = self._stack.enter_context(MetricsLog(run.directory.metrics, done_steps, trackers))
            self._progress = self._stack.enter_context(StepProgress(run.work.total_steps, done_steps))

    def step(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.log(record)
            self._progress.show(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
