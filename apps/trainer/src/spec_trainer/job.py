"""Runs a resolved training: inline in this process, or in processes of their own."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from spec_trainer.checkpoint.resume import checkpoint_to_resume
from spec_trainer.loop import train
from spec_trainer.progress import StepProgress
from spec_trainer.stop_request import StopRequest
from spec_trainer.wiring import RankLinks, engine_stream, finish, training_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from spec_trainer.feature_stream import BatchSource
    from spec_trainer.resolved_run import ResolvedRun


def run_training(plan: ResolvedRun) -> dict[str, Any]:
    """Trains, exports, writes summary and report; returns the summary. Resumes what its directory holds."""
    with (
        plan.directory.locked(),
        plan.backend.prepare_host(plan.config.placement.kind),
        StopRequest() as stop,
    ):
        # What the command was asked to resume from is for this command alone: the directory's own is the newest.
        plan.directory.open(plan.identity, plan.resuming("latest").config)
        start = checkpoint_to_resume(plan.directory.checkpoints, plan.config.train.resume_from)
        plan = plan.resuming(start.name if start else "latest")
        run = _train_inline if plan.config.placement.kind == "inline" else _launch
        return run(plan, stop)


def _launch(plan: ResolvedRun, stop: StopRequest) -> dict[str, Any]:
    """Every engine replica and trainer rank in a process of its own."""
    from spec_trainer.launch.local import run_local

    run_local(plan, stop, StepProgress(plan.work.total_steps))
    return json.loads(plan.directory.summary.read_text())


def _train_inline(plan: ResolvedRun, stop: StopRequest) -> dict[str, Any]:
    """Engine, if there is one, and the one trainer rank in this process."""
    import torch.distributed as dist

    device = plan.backend.device(0)
    features = engine_stream if plan.config.data.features is None else _folder_stream
    with ExitStack() as stack:
        stream, begin = stack.enter_context(features(plan, device))
        progress = stack.enter_context(StepProgress(plan.work.total_steps))
        links = RankLinks(
            store=dist.HashStore(), should_stop=lambda done_steps: stop.requested, show=progress.show
        )
        run = stack.enter_context(training_run(plan, 0, device, stream, links))
        begin(run.done_steps)
        return finish(run, train(run))


@contextmanager
def _folder_stream(
    plan: ResolvedRun, device: torch.device
) -> Iterator[tuple[BatchSource, Callable[[int], None]]]:
    """``data.features``: nothing to begin."""
    from spec_trainer.offline.store import open_features
    from spec_trainer.offline.stream import StoredStream

    with StoredStream(plan, 0, open_features(plan), device) as stream:
        yield stream, lambda done: None
