"""Divide batches so that the activations of each micro-batch fit the device, or warn.

This module does not import torch.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from spec_trainer.plan.memory import TRAINING, RunSizes, rooms, shown_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spec_trainer.plan.memory import MemoryPool
    from spec_trainer.run.spec import RunSpec

_STEPS = 20
"""Number of steps, from the first on, whose forward passes are estimated."""
_MARGIN = 1.25
"""Bytes of a pass, in units of the bytes that it saves for backward, besides ``_WORKSPACE``. Both were measured with
Eagle3 and DFlash without checkpointing (``h200-document-length.json``, ``h100-colocated-defaults.json`` of
``benchmarks/results``)."""
_WORKSPACE = 2 << 30
"""Bytes that a pass takes however little it saves for backward."""


def with_passes_that_fit(run: RunSpec) -> RunSpec:
    """Return the run with so many micro-batches per step that each forward pass fits on the device.

    Keep ``train.accumulation`` if the user or the run directory has set it. Keep the default 1 if the memory
    needed cannot be estimated (see ``activations_warning``).
    """
    is_set = "accumulation" in run.config.train.model_fields_set
    return run if is_set or not _is_known(run) else _fitting(run)


def activations_warning(run: RunSpec, sizes: RunSizes) -> str | None:
    """Return a warning if a forward pass saves more bytes than a device has left; else None.

    Return None also if the bytes cannot be estimated: for a run that generates its data or divides samples
    over ranks, and for a draft without ``saved_values``.
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
    """Return the run with the smallest ``train.accumulation`` whose micro-batches fit on the device.

    The value is never lowered. If no value is large enough, each micro-batch has one sample.
    """
    if _fits(run):
        return run
    least = run.config.train.accumulation
    most = _most_samples(run)
    more = range(least, max(least, most))
    found = bisect_left(more, True, key=lambda passes: _fits(run.with_accumulation(passes)))
    return run.with_accumulation(least + found)


def _fits(run: RunSpec) -> bool:
    """Return whether the largest forward and backward pass fits on every device that trains."""
    sizes = RunSizes(run)
    needed = _MARGIN * largest_pass_bytes(run) + _WORKSPACE
    return all(needed <= _left(run, room, sizes) for room in _trainers(run, sizes))


def largest_pass_bytes(run: RunSpec) -> int:
    """Return a lower bound on the bytes that the largest forward pass saves for the backward pass.

    Only the first steps are considered (``_STEPS``).
    """
    of_sample = run.draft_cost.saved_values
    itemsize = 4 if run.config.train.dtype == "float32" else 2

    def saved(sample_id: int) -> int:
        sample = run.dataset.sample(sample_id)
        return of_sample(len(sample), int(np.count_nonzero(sample.loss_mask)))

    return itemsize * max(sum(map(saved, part)) for share in _shares(run) for part in share)


def _is_known(run: RunSpec) -> bool:
    """Return whether the device's memory and the samples of each micro-batch are known."""
    divides = run.schedule.num_shares != run.config.train.ranks
    return not (run.config.decode.every or divides or run.backend.capabilities().device_bytes is None)


def _trainers(run: RunSpec, sizes: RunSizes) -> list[MemoryPool]:
    """Return the free memory (``MemoryPool``) of each device, or part of a device, on which a trainer rank runs."""
    return [room for room in rooms(run, sizes) if any(part.what == TRAINING for part in room.parts)]


def _most_samples(run: RunSpec) -> int:
    """Return the largest number of samples on which one rank trains in one step."""
    return max(sum(map(len, share)) for share in _shares(run))


def _shares(run: RunSpec) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the samples of each micro-batch, for each rank's share of each of the first steps."""
    for step in islice(run.schedule.steps, _STEPS):
        yield from run.schedule.shares(run.schedule.train_item(step))


def _left(run: RunSpec, room: MemoryPool, sizes: RunSizes) -> int:
    """Return the device memory that is left for activations when a backward pass begins, in bytes.

    With one micro-batch per step no gradients exist at that time, so their memory counts as left.
    """
    gradients = 4 * sizes.num_trained // sizes.shards.weights
    return room.free_bytes - room.least_bytes + (gradients if run.config.train.accumulation == 1 else 0)
