"""This worker program runs an engine replica, which captures the features of samples."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future
from contextlib import ExitStack

from spec_trainer.plan.resolve import resolve_parts
from spec_trainer.run.dispatch import SampleReference, capture_from
from spec_trainer.training.wiring import create_engine, start_engine
from spec_trainer.workers.dataset_copy import check_sees_run_directory, run_dataset
from spec_trainer.workers.decoded_folder import cycle_dataset
from spec_trainer.workers.health_watch import HealthWatch
from spec_trainer.workers.protocol import Capture, Captured, Perform, Ready, TrainCycle, WorkerOrder
from spec_trainer.workers.task_messages import task_dataset
from spec_trainer.workers.worker_main import ControllerLink

log = logging.getLogger(__name__)


def run_engine(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    """Capture features until the controller stops this worker or exits."""
    parts = resolve_parts(order.config)
    if parts.config.decode.every:
        check_sees_run_directory(order)  # it holds the answers
    engine = stack.enter_context(
        create_engine(
            parts,
            parts.target,
            placement=parts.config.placement.kind,
            memory_fraction=order.memory_fraction,
        )
    )
    start_engine(engine, parts.target, parts.schema)
    engine.health()
    stack.enter_context(HealthWatch(engine, controller, parts.config.timeouts.peer_s))
    dataset = run_dataset(order, controller.ask)
    controller.send(Ready())
    while True:
        match controller.receive():
            case Capture(batch, samples):
                references = [
                    SampleReference(request_id, sample_id, tuple(destinations))
                    for request_id, sample_id, destinations in samples
                ]
                done = capture_from(dataset, engine, parts.schema, references)
                done.add_done_callback(functools.partial(_report, controller, batch))
            case TrainCycle(number):
                dataset = cycle_dataset(parts.config, number)
            case Perform() as task:
                dataset = task_dataset(task)
            case _:
                return


def _report(controller: ControllerLink, batch: int, done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is None:
        controller.send(Captured(batch))
    else:
        log.error("capture batch %d failed", batch, exc_info=error)
        controller.report(error)
