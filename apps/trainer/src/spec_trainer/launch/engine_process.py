"""An engine replica as a process of its own: captures what the launcher's dispatcher asks for."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from spec_core.engine import EngineContext
from spec_core.records import CaptureRequest
from spec_trainer.launch.health_watch import HealthWatch
from spec_trainer.resolve import resolve_parts

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import ExitStack

    from spec_core.processes.control import ControlChannel, Record

log = logging.getLogger(__name__)


def run(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Until the launcher says stop, or is gone."""
    parts = resolve_parts(order["config"])
    timeouts = parts.config.timeouts
    context = EngineContext(
        backend=parts.backend,
        placement=parts.config.placement.kind,
        memory_fraction=order["memory_fraction"],
        start_s=timeouts.start_s,
        peer_s=timeouts.peer_s,
    )
    engine = stack.enter_context(parts.engine_type.create(parts.config.engine, parts.target, context))
    engine.start(parts.schema)
    engine.health()
    stack.enter_context(HealthWatch(engine, channel, timeouts.peer_s))
    channel.send("ready")
    for record in channel.records():
        if record["kind"] == "stop":
            return
        requests = [
            CaptureRequest(request_id=request_id, input_ids=tuple(ids), destinations=tuple(destinations))
            for request_id, ids, destinations in record["requests"]
        ]
        done = engine.capture(requests, parts.schema)
        done.add_done_callback(functools.partial(_report, channel, record["batch"]))


def _report(channel: ControlChannel, batch: int, done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is None:
        channel.send("captured", batch=batch)
    else:
        log.error("capture batch %d failed", batch, exc_info=error)
        channel.report(error)
