"""Divide a batch into forward passes whose activations fit beside the weights, or warn. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from spec_trainer.run.memory import TRAINING, RunSizes, rooms, shown_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spec_trainer.run.memory import Room
    from spec_trainer.run.spec import RunSpec

_STEPS = 20
"""Steps of the run whose forward passes are looked at."""
_MARGIN, _WORKSPACE = 1.25, 2 << 30
"""A forward and backward pass takes about so many times the bytes that it saves, and so many bytes more. So did
Eagle3 and DFlash without checkpointing (``h200-document-length.json``, ``h100-colocated-defaults.json`` of
``benchmarks/results``)."""


def with_passes_that_fit(run: RunSpec) -> RunSpec:
    """Return the run with as many forward passes in a step (``train.accumulation``) as the device's memory needs.

    A number that the user or the run directory has set stays. So does 1 where nothing is known
    (``activations_warning``).
    """
    is_set = "accumulation" in run.config.train.model_fields_set
    return run if is_set or not _is_known(run) else _fitting(run)


def activations_warning(run: RunSpec, sizes: RunSizes) -> str | None:
    """Return a warning if a rank's forward pass saves more than a device has left; None if nothing is known.

    Nothing is known of a run that generates its data or divides samples over ranks, and of a draft without
    ``saved_values``.
    """
    if not _is_known(run):
        return None
    saved = largest_pass_bytes(run)
    for room in _trainers(run, sizes):
        if saved > (left := _left(run, room, sizes)):
            fitting = _fitting(run)
            passes = f"set train.accumulation={fitting.config.train.accumulation}"
            advice = passes if _fits(fitting) else "lower the draft's size"
            return (
                f"a forward pass saves {shown_size(saved)} at least for the backward pass, and {room.name} has "
                f"{shown_size(max(left, 0))} left for it: {advice}, or save fewer activations (docs/scaling.md)"
            )
    return None


def _fitting(run: RunSpec) -> RunSpec:
    """Return the run with the fewest passes that fit, at least as many as it has; one sample a pass if none fit."""
    if _fits(run):
        return run
    least, most = run.config.train.accumulation, _most_samples(run)
    more = range(least, max(least, most))
    found = bisect_left(more, True, key=lambda passes: _fits(run.with_accumulation(passes)))
    return run.with_accumulation(least + found)


def _fits(run: RunSpec) -> bool:
    """Return whether each device that trains has room for the largest forward and backward pass."""
    sizes = RunSizes(run)
    needed = _MARGIN * largest_pass_bytes(run) + _WORKSPACE
    return all(needed <= _left(run, room, sizes) for room in _trainers(run, sizes))


def largest_pass_bytes(run: RunSpec) -> int:
    """Return the bytes that the largest forward pass of the first steps saves for its backward pass, at least."""
    of_sample, itemsize = run.draft.saved_values(run.target), 4 if run.config.train.dtype == "float32" else 2

    def saved(sample_id: int) -> int:
        sample = run.dataset.sample(sample_id)
        return of_sample(len(sample), int(np.count_nonzero(sample.loss_mask)))

    return itemsize * max(sum(map(saved, part)) for share in _shares(run) for part in share)


def _is_known(run: RunSpec) -> bool:
    """Return whether the memory of a device and the samples of a rank's passes are known."""
    divides = run.schedule.num_shares != run.config.train.ranks
    return not (run.config.decode.every or divides or run.backend.capabilities().device_bytes is None)


def _trainers(run: RunSpec, sizes: RunSizes) -> list[Room]:
    """Return the devices, or parts of devices, that train."""
    return [room for room in rooms(run, sizes) if any(part.what == TRAINING for part in room.parts)]


def _most_samples(run: RunSpec) -> int:
    """Return the most samples that a rank trains in a step."""
    return max(sum(map(len, share)) for share in _shares(run))


def _shares(run: RunSpec) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield each rank's share of each of the first steps: the samples of its forward passes."""
    for step in islice(run.schedule.steps, _STEPS):
        yield from run.schedule.shares(run.schedule.train_item(step))


def _left(run: RunSpec, room: Room, sizes: RunSizes) -> int:
    """Return the bytes that are left when a backward pass begins; before a step's first one, without gradients."""
    gradients = 4 * sizes.num_trained // sizes.shards.weights
    return room.free_bytes - room.least_bytes + (gradients if run.config.train.accumulation == 1 else 0)
