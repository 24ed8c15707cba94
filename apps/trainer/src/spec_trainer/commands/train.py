"""Run a resolved training, inline in this process or by workers."""

from __future__ import annotations

import functools
import json
import logging
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError
from spec_trainer.checkpoint.folder import read_meta, step_of
from spec_trainer.checkpoint.resume import CommandCheckpoints
from spec_trainer.checkpoint.store import check_strategy
from spec_trainer.command_line.progress import StepProgress
from spec_trainer.command_line.stop_request import StopRequest
from spec_trainer.data.kept import keep_run_data
from spec_trainer.push.servers import check_servers
from spec_trainer.run.log import cut_records
from spec_trainer.training.wiring import (
    RankLinks,
    inline_engine,
    inline_source,
    train_and_finish,
    train_state,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from spec_core import Engine
    from spec_trainer.controller.run_controller import RunController
    from spec_trainer.push.live_measurements import Measure
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.run.timer import Timer
    from spec_trainer.training.loop import TrainState
    from spec_trainer.training.wiring import InlineSource

log = logging.getLogger(__name__)


def run_training(spec: RunSpec) -> dict[str, Any]:
    """Train, export, and return the summary; resume what the run directory holds."""
    check_servers(spec)
    with spec.directory.locked(), StopRequest() as stop:
        # train.resume_from holds for this command alone: the run directory's own configuration says "latest".
        spec.directory.open(spec.identity, spec.resuming("latest").config)
        keep_run_data(spec.source, spec.directory.root)
        checkpoints = CommandCheckpoints(
            spec.directory.checkpoints, spec.config.train.resume_from, spec.identity
        )
        if checkpoints.first is not None:
            check_strategy(spec.strategy_type, checkpoints.first)
        start, asked, limit = checkpoints.first, spec, spec.config.train.restarts
        for restart in range(limit):
            try:
                return _train_from(start, spec, stop)
            except RunError as error:
                if stop.requested:
                    raise
                again = "the run begins again at this command's newest checkpoint, or where it began"
                log.warning("%s; %s (%d of train.restarts=%d)", error, again, restart + 1, limit)
                start, before, spec = checkpoints.newest(), spec, asked.with_room()
                _note_room(asked, before, spec)
        return _train_from(start, spec, stop)


def _note_room(asked: RunSpec, before: RunSpec, now: RunSpec) -> None:
    """Say how many workers a run begins again with, where that has changed, and which hosts it has lost."""
    if now.config.train.ranks == before.config.train.ranks:
        return
    gone = {member.host for member in asked.members()} - {member.host for member in now.members()}
    log.warning(
        "the run goes on with %d of %d trainer ranks and %d of %d engine replicas%s",
        now.config.train.ranks, asked.config.train.ranks,
        now.config.engine.replicas, asked.config.engine.replicas,
        f", without host {', '.join(sorted(gone))}" if gone else "",
    )  # fmt: skip


def _train_from(start: Path | None, spec: RunSpec, stop: StopRequest) -> dict[str, Any]:
    """Train from a checkpoint, or from step 0, to the end."""
    cut_records(spec.directory, step_of(start) if start else 0)
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

    work = None
    if spec.config.decodes:
        work = functools.partial(
            _cycles_by_workers if spec.config.decode.every else _measured_by_workers, spec
        )
    run_workers(spec, stop, StepProgress(spec.schedule.total_steps), work=work)
    return _summary(spec)


def _measured_by_workers(spec: RunSpec, controller: RunController) -> None:
    """Train while decoders measure the draft of now."""
    from spec_trainer.decode.measurement import Measurement

    with Measurement(spec, controller.decoder) as measurement:
        controller.train_measuring(measurement.measure)


def _cycles_by_workers(spec: RunSpec, controller: RunController) -> None:
    """Train cycle by cycle on what workers decode."""
    from spec_trainer.decode.cycles import TrainedPart, train_with_decode

    def train_part(part: RunSpec, notes: dict[str, Any], timer: Timer) -> TrainedPart:
        prefill_s = controller.train_cycle(part, notes["cycle"], notes)
        is_last = part.schedule.steps.stop == part.schedule.total_steps
        summary = _summary(spec) if is_last else {}
        timer.total_s |= {
            name: seconds for name, seconds in summary.get("time_s", {}).items() if name != "other"
        }
        return TrainedPart(summary=summary, prefill_s=prefill_s)

    train_with_decode(spec, controller.decoder, _done_steps(spec), train_part)


def _summary(spec: RunSpec) -> dict[str, Any]:
    return json.loads(spec.directory.summary.read_text())


def _done_steps(spec: RunSpec) -> int:
    """Return the steps of the checkpoint that the run begins from."""
    start = spec.config.train.resume_from
    return 0 if start == "latest" else read_meta(spec.directory.checkpoints / start).step


def _train_inline(spec: RunSpec, stop: StopRequest) -> dict[str, Any]:
    """Train with the engine, if there is one, and the one rank in this process."""
    if spec.config.decode.every:
        return _cycles_inline(spec, stop)
    device = spec.backend.device(0)
    with ExitStack() as stack:
        own = measure = None
        if spec.config.train.serve_every:
            own = stack.enter_context(inline_engine(spec))
            measure = stack.enter_context(_measured_inline(spec, own.engine, stop))
        source = stack.enter_context(inline_source(spec, device, own))
        progress = stack.enter_context(StepProgress(spec.schedule.total_steps))
        rank = _inline_rank(spec, device, source, stop, progress, measure)
        return train_and_finish(stack.enter_context(rank))


@contextmanager
def _measured_inline(spec: RunSpec, engine: Engine, stop: StopRequest) -> Iterator[Measure]:
    """Yield what has ``engine`` measure a draft, while the trainer waits."""
    from spec_trainer.decode.decoder import EngineDecoder, InlineDecoder
    from spec_trainer.decode.measurement import Measurement

    with (
        EngineDecoder(spec, engine) as decoder,
        Measurement(spec, InlineDecoder(decoder, stop)) as measurement,
    ):

        def measure(version: int, folder: Path) -> Future[dict[str, Any]]:
            done: Future[dict[str, Any]] = Future()
            done.set_result(measurement.measure(version, folder))
            return done

        yield measure


def _cycles_inline(spec: RunSpec, stop: StopRequest) -> dict[str, Any]:
    """Train cycle by cycle on what the run's engine decodes, in this process."""
    from spec_trainer.decode.cycles import TrainedPart, train_with_decode
    from spec_trainer.decode.decoder import EngineDecoder, InlineDecoder

    device = spec.backend.device(0)
    with (
        inline_engine(spec) as own,
        EngineDecoder(spec, own.engine) as decoder,
        StepProgress(spec.schedule.total_steps) as progress,
    ):

        def train_part(part: RunSpec, notes: dict[str, Any], timer: Timer) -> TrainedPart:
            with ExitStack() as stack:
                source = stack.enter_context(inline_source(part, device, own))
                state = stack.enter_context(_inline_rank(part, device, source, stop, progress))
                state.notes, state.timer = lambda: {**notes, "prefill_s": source.capture_s()}, timer
                return TrainedPart(summary=train_and_finish(state), prefill_s=source.capture_s())

        return train_with_decode(spec, InlineDecoder(decoder, stop), _done_steps(spec), train_part)


@contextmanager
def _inline_rank(
    spec: RunSpec,
    device: torch.device,
    source: InlineSource,
    stop: StopRequest,
    progress: StepProgress,
    measure: Measure | None = None,
) -> Iterator[TrainState]:
    """Yield the state of the one rank, for which the capture of its batches has begun."""
    import torch.distributed as dist

    links = RankLinks(
        store=dist.HashStore(),
        should_stop=lambda done_steps: stop.requested,
        show=progress.show,
        measure=measure,
    )
    with train_state(spec, 0, device, source.stream, links) as state:
        source.begin(state.done_steps)
        yield state
