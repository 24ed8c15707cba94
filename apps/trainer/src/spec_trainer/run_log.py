"""RunLog: what a rank says about each step. Every rank notes what it has trained; rank 0 reports the rest."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from spec_trainer.metrics import MetricsLog, StepLines, build_trackers, drop_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core import BatchShare
    from spec_trainer.run_spec import RunSpec


class RunLog:
    """On every rank ``logs/trained-RANK.jsonl``; on rank 0 metrics.jsonl, trackers, and ``show``, which puts a step's
    record where the person looks."""

    def __init__(
        self, run: RunSpec, rank: int, done_steps: int, show: Callable[[dict[str, Any]], None]
    ) -> None:
        self._show = show
        self._reports = rank == 0
        logs, ranks = run.directory.logs, run.config.train.ranks
        with ExitStack() as stack:
            self._trained = stack.enter_context(StepLines(logs / f"trained-{rank}.jsonl", done_steps))
            if self._reports:
                for file in logs.glob("trained-*.jsonl"):
                    if int(file.stem.removeprefix("trained-")) >= ranks:  # of ranks that the run had before
                        drop_after(file, done_steps)
                trackers = build_trackers(run.config.track, run.directory)
                self._metrics = stack.enter_context(MetricsLog(run.directory.metrics, done_steps, trackers))
            self._stack = stack.pop_all()

    def trained(self, step: int, share: BatchShare) -> None:
        """The samples that this rank's part of a step was made of: what an odd step has seen, and the proof that
        every sample was trained exactly once."""
        samples = [span.sample_id for batch in share.micro_batches for span in batch.spans]
        self._trained.write({"step": step, "samples": samples})

    def step(self, record: dict[str, Any]) -> None:
        if self._reports:
            self._metrics.log(record)
            self._show(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
