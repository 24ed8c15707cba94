"""Convert tasks and their samples to messages and back, so that no file ever holds the samples."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.run.spec import RunSpec
from spec_trainer.workers.protocol import Perform
from spec_trainer.workers.run_driver import RankTask


def task_message(task: RankTask, part: RunSpec, notes: Mapping[str, Any]) -> Perform:
    """Return the message that makes a trainer rank perform ``task`` on the samples of ``part``.

    ``part``: a RunSpec with these samples. ``notes``: fields that are added to every row of metrics.
    """
    settings, steps = part.schedule.settings, part.schedule.steps
    return Perform(
        entry=task.entry,
        arguments=dict(task.arguments),
        samples=[
            (_text(sample.input_ids.astype("<i4")), _text(np.packbits(sample.loss_mask)))
            for sample in part.dataset.train
        ],
        steps=(steps.start, steps.stop),
        settings={"global_batch_tokens": settings.global_batch_tokens, "shuffle": settings.shuffle},
        start_step=part.start_step,
        notes=dict(notes),
    )


def task_part(spec: RunSpec, message: Perform) -> RunSpec:
    """Return the RunSpec that a ``Perform`` message describes: ``spec`` with the message's samples.

    ``task_message`` made the message.
    """
    part = spec.cycle(task_dataset(message), range(*message.steps), **message.settings)
    return part.starting_at(message.start_step)


def task_dataset(message: Perform) -> Dataset:
    """Return the samples of a ``Perform`` message."""
    samples = tuple(_sample(number, *arrays) for number, arrays in enumerate(message.samples))
    return Dataset(samples, (), DataReport())


def _sample(number: int, ids: str, mask: str) -> Sample:
    input_ids = np.frombuffer(bytearray(base64.b64decode(ids)), dtype="<i4").astype(np.int32, copy=False)
    packed = np.frombuffer(base64.b64decode(mask), dtype=np.uint8)
    return Sample(number, input_ids, np.unpackbits(packed, count=len(input_ids)).astype(bool))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
