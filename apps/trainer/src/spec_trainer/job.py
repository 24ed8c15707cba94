"""Run a resolved training, inline in this process or by workers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from spec_trainer.checkpoint.resume import checkpoint_to_resume
from spec_trainer.loop import train
from spec_trainer.progress import StepProgress
from spec_trainer.push.servers import check_servers
from spec_trainer.stop_request import StopRequest
from spec_trainer.wiring import RankLinks, finish, inline_source, train_state

if TYPE_CHECKING:
    from spec_trainer.run_spec import RunSpec


def run_training(spec: RunSpec) -> dict[str, Any]:
    """Train, export, and return the summary; resume what the run directory holds."""
    check_servers(spec)
    with (
        spec.directory.locked(),
        spec.backend.prepare_host(spec.config.placement.kind),
        StopRequest() as stop,
    ):
        # train.resume_from holds for this command alone: the run directory's own configuration says "latest".
        spec.directory.open(spec.identity, spec.resuming("latest").config)
        start = checkpoint_to_resume(spec.directory.checkpoints, spec.config.train.resume_from)
        spec = spec.resuming(start.name if start else "latest")
        train_run = _train_inline if spec.config.placement.kind == "inline" else _train_by_workers
        try:
            return train_run(spec, stop)
        finally:
            spec.directory.remove_unfinished()


def _train_by_workers(spec: RunSpec, stop: StopRequest) -> dict[str, Any]:
    """Train with each engine replica and trainer rank in a process of its own."""
    from spec_trainer.controller.run_controller import run_workers

    run_workers(spec, stop, StepProgress(spec.schedule.total_steps))
    return json.loads(spec.directory.summary.read_text())


def _train_inline(spec: RunSpec, stop: StopRequest) -> dict[str, Any]:
    """Train with the engine, if there is one, and the one rank in this process."""
    import torch.distributed as dist

    device = spec.backend.device(0)
    with ExitStack() as stack:
        stream, begin = stack.enter_context(inline_source(spec, device))
        progress = stack.enter_context(StepProgress(spec.schedule.total_steps))
        links = RankLinks(
            store=dist.HashStore(), should_stop=lambda done_steps: stop.requested, show=progress.show
        )
        state = stack.enter_context(train_state(spec, 0, device, stream, links))
        begin(state.done_steps)
        return finish(state, train(state))
