"""Train a resolved run, in this process or with worker processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_core.errors import RunError
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.data.kept import keep_run_data
from spec_trainer.live.cycles import train_with_decode
from spec_trainer.measure.measurement import Measurement
from spec_trainer.plan.memory import RunSizes
from spec_trainer.plan.warnings import run_warnings
from spec_trainer.push.servers import check_servers
from spec_trainer.run.log import cut_records
from spec_trainer.run.spec import RunSpec
from spec_trainer.training.checkpoint.folder import step_of
from spec_trainer.training.checkpoint.resume import CommandCheckpoints
from spec_trainer.training.checkpoint.store import check_strategy
from spec_trainer.workers.inline_driver import inline_driver
from spec_trainer.workers.run_driver import RunDriver
from spec_trainer.workers.worker_driver import worker_driver

log = logging.getLogger(__name__)

_NO_LOSS = (
    "its batch trains nothing: either no token is supervised, or the draft's vocabulary (draft.vocab_size) has "
    "none of the tokens that the target prefers there; raise it, or train on the target's own answers "
    "(spec-trainer regenerate)"
)


def run_training(
    spec: RunSpec,
    limit: TimeLimit | None = None,
    more_steps: str | None = None,
    steps_limit: TimeLimit | None = None,
) -> dict[str, Any]:
    """Train the draft, export it, and return the summary; resume if the run directory has checkpoints.

    ``limit``: raise Interrupted after the step that is under way then, as when a user stops the command;
    ``steps_limit``: likewise, but its time begins after the first step.
    ``more_steps``: what a user has to do for more steps, if not to set configuration keys.
    """
    check_servers(spec)
    with spec.directory.locked(), StopRequest() as stop:
        if limit is not None:
            stop.request_after(limit.left_s)
        # train.resume_from holds for this command alone: the run directory's own configuration says "latest".
        spec.directory.open(spec.identity, spec.resuming("latest").config)
        keep_run_data(spec.source, spec.directory.root)
        checkpoints = CommandCheckpoints(
            spec.directory.checkpoints, spec.config.train.resume_from, spec.identity
        )
        if checkpoints.first is not None:
            check_strategy(spec.strategy_type, checkpoints.first)
        for warning in run_warnings(spec, RunSizes(spec), more_steps):
            log.warning("%s", warning)
        start = checkpoints.first
        asked = spec
        restarts = spec.config.train.restarts
        for restart in range(restarts):
            try:
                return _train_from(start, spec, stop, steps_limit)
            except RunError as error:
                if stop.requested:
                    raise
                again = "the run begins again at this command's newest checkpoint, or where it began"
                log.warning("%s; %s (%d of train.restarts=%d)", error, again, restart + 1, restarts)
                start = checkpoints.newest()
                before = spec
                spec = asked.with_room()
                _note_room(asked, before, spec)
        return _train_from(start, spec, stop, steps_limit)


def _note_room(asked: RunSpec, before: RunSpec, now: RunSpec) -> None:
    """Log the new number of workers, and the lost hosts, if a run restarts with another number.

    ``asked``: the run as configured; ``before`` and ``now``: with the workers of the failed and of the new
    attempt.
    """
    if now.config.train.ranks == before.config.train.ranks:
        return
    gone = {member.host for member in asked.members()} - {member.host for member in now.members()}
    log.warning(
        "the run goes on with %d of %d trainer ranks and %d of %d engine replicas%s",
        now.config.train.ranks, asked.config.train.ranks,
        now.config.engine.replicas, asked.config.engine.replicas,
        f", without host {', '.join(sorted(gone))}" if gone else "",
    )  # fmt: skip


def _train_from(
    start: Path | None, spec: RunSpec, stop: StopRequest, steps_limit: TimeLimit | None
) -> dict[str, Any]:
    """Train to the end, from the checkpoint ``start`` or from step 0."""

    def begun(record: Mapping[str, Any]) -> None:
        if record["loss"] == 0:
            log.warning("step %d: loss 0: %s", record["step"], _NO_LOSS)
        if steps_limit is not None:
            steps_limit.begin()
            stop.request_after(steps_limit.left_s)

    spec = spec.starting_at(step_of(start) if start else 0)
    cut_records(spec.directory, spec.start_step)
    try:
        opened = inline_driver if spec.config.placement.kind == "inline" else worker_driver
        # Steps that are timed are not the run's: its number of steps is not known yet.
        total_steps = None if steps_limit is not None else spec.schedule.total_steps
        with opened(spec, stop, StepProgress(total_steps, begun=begun)) as driver:
            _train_by(driver, spec)
        return spec.directory.read_summary()
    finally:
        spec.directory.remove_unfinished()


def _train_by(driver: RunDriver, spec: RunSpec) -> None:
    """Train the whole run with ``driver``.

    If the configuration says so, the run's engine also measures the draft, or generates the answers to train on.
    """
    if spec.config.decode.every:
        train_with_decode(spec, driver)
    elif spec.config.train.serve_every:
        with Measurement(spec, driver) as measurement:
            driver.train(spec, measure=measurement.measure)
    else:
        driver.train(spec)
