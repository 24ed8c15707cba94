"""Build the WorkerSpecs with which a launcher starts the workers of a run."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from spec_trainer.workers import protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spec_core import WorkerSpec
    from spec_trainer.run.spec import RunSpec

DECODER = "spec_trainer.workers.decoder_worker:run_decoder"
"""Entry function of the engines that decode."""
TRAINER = ("trainer", "spec_trainer.workers.trainer_worker:run_trainer")
"""Role and entry function of the trainer ranks."""
_ENTRY = "spec_trainer.workers.worker_main:run_worker"
_ENGINE = "spec_trainer.workers.engine_worker:run_engine"


def worker_specs(spec: RunSpec, dataset: Path, consumer: tuple[str, str] = TRAINER) -> Iterator[WorkerSpec]:
    """Yield the WorkerSpec of every worker of a run.

    ``dataset``: folder of the tokenised dataset. ``consumer``: role and entry function of the workers that
    receive features.
    """
    token = secrets.token_hex(16)
    config = spec.config.model_dump(mode="json")
    if spec.config.decode.every:  # a worker does not know how long prompts are
        config["placement"]["window_bytes"] = spec.window_bytes
    for member in spec.members():
        engine = ("decoder", DECODER) if member.decodes else ("engine", _ENGINE)
        role, program = engine if member.role == "engine" else consumer
        name = f"{role}-{member.index}"
        order = protocol.WorkerOrder(
            name=name,
            program=program,
            index=member.index,
            memory_fraction=member.memory_fraction,
            init_order=member.init_order,
            config=config,
            token=token,
            dataset=str(dataset),
        )
        yield replace(member.worker, name=name, entry=_ENTRY, arguments=vars(order))
