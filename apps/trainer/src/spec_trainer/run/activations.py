"""Warn of a forward pass whose activations do not fit beside the weights. Imports no torch."""

from __future__ import annotations

from itertools import islice
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from spec_trainer.run.memory import TRAINING, RunSizes, rooms, shown_size

if TYPE_CHECKING:
    from spec_trainer.run.memory import Room
    from spec_trainer.run.spec import RunSpec

_STEPS = 20
"""Steps of the run whose forward passes are looked at."""


def activations_warning(run: RunSpec, sizes: RunSizes) -> str | None:
    """Return a warning if a rank's forward pass saves more than a device has left; None if nothing is known.

    Nothing is known of a run that generates its data or divides samples over ranks, and of a draft without
    ``saved_values``.
    """
    divides = run.schedule.num_shares != run.config.train.ranks
    if run.config.decode.every or divides or run.backend.capabilities().device_bytes is None:
        return None
    saved = largest_pass_bytes(run)
    trained = [room for room in rooms(run, sizes) if any(part.what == TRAINING for part in room.parts)]
    for room in trained:
        if saved > (left := _left(room, sizes)):
            passes = ceil(run.config.train.accumulation * saved / max(left, 1))
            advice = f"set train.accumulation={passes} or more" if left > 0 else "lower the draft's size"
            return (
                f"a forward pass saves {shown_size(saved)} at least for the backward pass, and {room.name} has "
                f"{shown_size(max(left, 0))} left for it: {advice}, or save fewer activations (docs/scaling.md)"
            )
    return None


def largest_pass_bytes(run: RunSpec) -> int:
    """Return the bytes that the largest forward pass of the first steps saves for its backward pass, at least."""
    of_sample, itemsize = run.draft.saved_values(run.target), 4 if run.config.train.dtype == "float32" else 2

    def saved(sample_id: int) -> int:
        sample = run.dataset.sample(sample_id)
        return of_sample(len(sample), int(np.count_nonzero(sample.loss_mask)))

    steps = islice(run.schedule.steps, _STEPS)
    shares = (share for step in steps for share in run.schedule.shares(run.schedule.train_item(step)))
    return itemsize * max(sum(map(saved, part)) for share in shares for part in share)


def _left(room: Room, sizes: RunSizes) -> int:
    """Return the bytes that are left when the backward pass begins, before there are gradients."""
    return room.free_bytes - room.least_bytes + 4 * sizes.num_trained // sizes.shards.weights
