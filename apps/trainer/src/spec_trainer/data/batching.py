"""Assign samples to optimizer steps, ranks and micro-batches, by pure functions.

A global batch is a list of samples with a limit on its tokens (without padding). It is a function of (data, seed,
epoch, step). The ranks' shares, the micro-batches and the engine's capture batches only divide its samples.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_trainer.data.dataset import Sample

Ids = tuple[int, ...]

_COUNTED_EPOCHS = 100
"""Largest number of epochs whose steps are counted exactly."""
_COUNTED_SAMPLES = 10**7
"""Largest number of samples in all epochs whose steps are counted exactly."""
_EPOCH_SAMPLES = 300
"""Number of samples as which an epoch's order counts: to draw it takes as long as to count them."""


@dataclass(frozen=True)
class EpochBatch:
    """The samples of one optimizer step."""

    epoch: int
    sample_ids: Ids


class EpochBatches:
    """The global batches of a run, step by step.

    An epoch visits every sample once, in an order drawn from (seed, epoch). A batch takes the next samples as long as
    they fit the token budget, at least one sample, and never spans epochs. Thread-safe; steps may be requested in any
    order.
    """

    def __init__(
        self, samples: Sequence[Sample], global_batch_tokens: int, *, seed: int, shuffle: bool
    ) -> None:
        """Prepare the batches; if ``shuffle``, each epoch has another order, drawn from ``seed``."""
        self._ids = np.array([sample.sample_id for sample in samples], dtype=np.int64)
        self._lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
        self._budget = global_batch_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._lock = threading.Lock()
        self._first_steps = [0]
        """First step of each epoch computed so far."""
        self._latest: tuple[int, list[Ids]] = (-1, [])

    def batch(self, step: int) -> EpochBatch:
        """Return the batch of optimizer step ``step``, counted from 0."""
        with self._lock:
            while self._first_steps[-1] <= step:
                self._first_steps.append(
                    self._first_steps[-1] + len(self._batches(len(self._first_steps) - 1))
                )
            epoch = bisect_right(self._first_steps, step) - 1
            return EpochBatch(epoch, self._batches(epoch)[step - self._first_steps[epoch]])

    def steps_in_epoch(self, epoch: int) -> int:
        """Return the number of global batches of an epoch."""
        with self._lock:
            return len(self._batches(epoch))

    def steps_in_epochs(self, epochs: int) -> int:
        """Return the number of steps of the first ``epochs`` epochs.

        If there are too many epochs to count, the steps of the rest are extrapolated from the counted epochs.
        """
        if not self._shuffle or self._uniform:
            return epochs * self.steps_in_epoch(0)
        counted = min(epochs, max(_COUNTED_EPOCHS, _COUNTED_SAMPLES // (len(self._ids) + _EPOCH_SAMPLES)))
        steps = sum(self.steps_in_epoch(epoch) for epoch in range(counted))
        return steps + (epochs - counted) * steps // counted

    @property
    def _uniform(self) -> bool:
        """Whether the number of batches of an epoch does not depend on the order of the samples."""
        one_batch = int(self._lengths.sum()) <= self._budget
        return one_batch or len(np.unique(self._lengths)) == 1

    def _batches(self, epoch: int) -> list[Ids]:
        if self._latest[0] != epoch:
            order = self._order(epoch)
            borders = _borders(self._lengths[order], self._budget)
            ids = self._ids[order].tolist()
            self._latest = (epoch, [tuple(ids[start:stop]) for start, stop in pairwise(borders)])
        return self._latest[1]

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._ids))
        return epoch_order(len(self._ids), self._seed, epoch)


def epoch_order(num: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of 0 … ``num`` - 1 for an epoch, drawn from (seed, epoch)."""
    # numpy promises the raw stream of a bit generator for ever, but not what it makes of it (NEP 19).
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(num), kind="stable")


def _borders(lengths: np.ndarray, budget: int) -> list[int]:
    """Return the indices at which batches begin and end, [0, …, len(lengths)].

    A batch takes the next samples as long as their tokens do not exceed ``budget``.
    """
    ends = np.cumsum(lengths)
    borders = [0]
    while borders[-1] < len(lengths):
        start = borders[-1]
        used = int(ends[start - 1]) if start else 0
        borders.append(max(start + 1, int(np.searchsorted(ends, used + budget, side="right"))))
    return borders


def shares(
    sample_ids: Sequence[int], costs: Mapping[int, int], world_size: int, accumulation: int
) -> tuple[tuple[Ids, ...], ...]:
    """Divide a global batch's samples into micro-batches; return sample ids by [rank][micro-batch].

    Every sample occurs once, and micro-batches may be empty. ``costs``: the cost of each sample, such as its
    number of tokens. The costs of all micro-batches are balanced, not only the sums of each rank, because
    ranks synchronize in each micro-batch. Samples are assigned from the most expensive to the cheapest, each
    to the cheapest micro-batch at that time. If several are the cheapest, the earlier micro-batch is taken,
    then the lower rank.
    """
    parts: list[list[int]] = [[] for _ in range(world_size * accumulation)]
    loads = [(0, part) for part in range(len(parts))]
    """Heap of (cost, index) of each micro-batch."""
    for sample_id in _largest_first(sample_ids, costs):
        cost, lightest = loads[0]
        parts[lightest].append(sample_id)
        heapq.heapreplace(loads, (cost + costs[sample_id], lightest))
    return tuple(
        tuple(tuple(sorted(parts[micro * world_size + rank])) for micro in range(accumulation))
        for rank in range(world_size)
    )


def capture_batches(sample_ids: Sequence[int], lengths: Mapping[int, int], batch_tokens: int) -> list[Ids]:
    """Divide one step's samples into batches for the target's forward passes, longest sample first.

    Return the sample ids of each batch. A batch has at most ``batch_tokens`` tokens, padding included; a
    longer sample has a batch of its own.
    """
    batches: list[list[int]] = []
    for sample_id in _largest_first(sample_ids, lengths):
        # The first sample of a batch is its longest, hence its width.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(sample_id)
        else:
            batches.append([sample_id])
    return [tuple(batch) for batch in batches]


def _largest_first(sample_ids: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
    """Return the sample ids by descending size, and samples of equal size by ascending id."""
    return sorted(sorted(sample_ids), key=sizes.__getitem__, reverse=True)
