"""Run a resolved training, inline in this process or by workers."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from spec_trainer.checkpoint.folder import read_meta
from spec_trainer.checkpoint.resume import checkpoint_to_resume
from spec_trainer.loop import train
from spec_trainer.progress import StepProgress
from spec_trainer.push.servers import check_servers
from spec_trainer.stop_request import StopRequest
from spec_trainer.wiring import RankLinks, finish, inline_engine, inline_source, train_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from spec_trainer.feature_stream import BatchSource
    from spec_trainer.loop import TrainState
    from spec_trainer.run_spec import RunSpec
    from spec_trainer.timer import Timer


def run_training(spec: RunSpec) -> dict[str, Any]:
    """Train, export, and return the summary; resume what the run directory holds."""
    check_servers(spec)
    with spec.directory.locked(), StopRequest() as stop:
        # train.resume_from holds for this command alone: the run directory's own configuration says "latest".
        spec.directory.open(spec.identity, spec.resuming("latest").config)
        start = checkpoint_to_resume(spec.directory.checkpoints, spec.config.train.resume_from)
        spec = spec.resuming(start.name if start else "latest")
        inline = spec.config.placement.kind == "inline"
        train_run = _train_inline if inline else _train_by_workers
        try:
            # A launcher prepares the hosts of its workers itself.
            with spec.backend.prepare_host("inline") if inline else nullcontext():
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
    if spec.config.decode.every:
        return _train_and_decode(spec, stop)
    device = spec.backend.device(0)
    with ExitStack() as stack:
        source = stack.enter_context(inline_source(spec, device))
        progress = stack.enter_context(StepProgress(spec.schedule.total_steps))
        state = stack.enter_context(_inline_rank(spec, device, source, stop, progress))
        return finish(state, train(state))


def _train_and_decode(spec: RunSpec, stop: StopRequest) -> dict[str, Any]:
    """Train cycle by cycle on what the run's engine decodes, in this process."""
    from spec_trainer.decode.cycles import train_with_decode

    device = spec.backend.device(0)
    start = spec.config.train.resume_from
    done_steps = 0 if start == "latest" else read_meta(spec.directory.checkpoints / start).step
    with inline_engine(spec) as own, StepProgress(spec.schedule.total_steps) as progress:

        def train_part(part: RunSpec, notes: dict[str, Any], timer: Timer) -> dict[str, Any]:
            with ExitStack() as stack:
                source = stack.enter_context(inline_source(part, device, own))
                state = stack.enter_context(_inline_rank(part, device, source, stop, progress))
                state.notes, state.timer = notes, timer
                last = train(state)
                is_last = state.done_steps == part.schedule.total_steps
                return finish(state, last) if is_last else {}

        return train_with_decode(spec, own.engine, stop, done_steps, train_part)


@contextmanager
def _inline_rank(
    spec: RunSpec,
    device: torch.device,
    source: tuple[BatchSource, Callable[[int], None]],
    stop: StopRequest,
    progress: StepProgress,
) -> Iterator[TrainState]:
    """Yield the state of the one rank, for which the capture of its batches has begun."""
    import torch.distributed as dist

    stream, begin = source
    links = RankLinks(
        store=dist.HashStore(), should_stop=lambda done_steps: stop.requested, show=progress.show
    )
    with train_state(spec, 0, device, stream, links) as state:
        begin(state.done_steps)
        yield state
