"""This worker program runs a decoder: an engine that serves the run's draft and answers prompts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from spec_trainer.plan.resolve import resolve_parts
from spec_trainer.training.wiring import create_engine
from spec_trainer.workers.dataset_copy import check_sees_run_directory
from spec_trainer.workers.decoder import EngineDecoder, Portion
from spec_trainer.workers.health_watch import HealthWatch
from spec_trainer.workers.passes import Pass
from spec_trainer.workers.protocol import Generate, Generated, Ready, Serve, Served, WorkerOrder
from spec_trainer.workers.worker_main import ControllerLink


def run_decoder(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    """Serve drafts and answer prompts until the controller stops this worker or exits."""
    parts = resolve_parts(order.config)
    check_sees_run_directory(order)  # it holds the drafts that this engine serves
    engine = stack.enter_context(create_engine(parts, parts.target, memory_fraction=order.memory_fraction))
    stack.enter_context(HealthWatch(engine, controller, parts.config.timeouts.peer_s))
    decoder = stack.enter_context(EngineDecoder(parts, engine))
    controller.send(Ready())
    while True:
        match controller.receive():
            case Serve(version, folder):
                decoder.serve(version, Path(folder))
                controller.send(Served())
            case Generate(prompts, seed):
                controller.send(_generated(decoder.generate(Portion(prompts=prompts, seed=seed))))
            case _:
                return


def _generated(decoded: Pass) -> Generated:
    answers = [
        (list(answer.token_ids), list(answer.guess_depths), list(answer.verifications))
        for answer in decoded.answers
    ]
    return Generated(answers, asdict(decoded.counters), decoded.seconds)
