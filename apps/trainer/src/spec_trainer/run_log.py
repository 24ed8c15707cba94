"""RunLog: what the rank that reports says about each step; the other ranks say nothing."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from spec_trainer.metrics import MetricsLog, build_trackers

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_trainer.resolve import ResolvedRun


class RunLog:
    """metrics.jsonl and trackers, and ``show``, which puts a step's record where the person looks."""

    def __init__(
        self, run: ResolvedRun, done_steps: int, show: Callable[[dict[str, Any]], None] | None
    ) -> None:
        """``show`` is None on the ranks that say nothing."""
        self._stack = ExitStack()
        self._show = show
        if show is not None:
            trackers = build_trackers(run.config.track, run.directory)
            self._metrics = self._stack.enter_context(MetricsLog(run.directory.metrics, done_steps, trackers))

    def step(self, record: dict[str, Any]) -> None:
        if self._show is not None:
            self._metrics.log(record)
            self._show(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
