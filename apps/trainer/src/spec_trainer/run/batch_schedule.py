"""BatchSchedule lists a run's global batches, in order, as a pure function of data, seed and ranks.

Every process of a run derives the same items (batches to train or to evaluate) from the same configuration,
without communication. A resumed run starts at exactly the next sample. The order of the items is also the
order in which features are admitted to memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from spec_core.plugin_faults import checked_answer
from spec_core.records import Supervision
from spec_trainer.data.batching import EpochBatches, capture_batches, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from spec_core import Draft, Strategy
    from spec_trainer.configuration.run import AnyRunConfig
    from spec_trainer.data.dataset import Dataset, Sample


@dataclass(frozen=True)
class GlobalBatch:
    """One global batch, to train on or to evaluate."""

    step: int
    """Optimizer step that trains the batch, counted from 0; for an evaluation, the number of steps done before it."""
    evaluates: bool
    epoch: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Plain numbers of a configuration that, together with the data, determine the global batches."""

    global_batch_tokens: int
    shuffle: bool
    seed: int
    data_parallel_ranks: tuple[int, ...]
    """Data-parallel rank of each trainer process, which is the index of the share that the process trains."""
    accumulation: int
    balance: Literal["cost", "tokens"]
    """Quantity that is divided evenly over ranks and micro-batches."""
    capture_tokens: int
    """Largest number of tokens of one capture batch of the engine."""
    total_steps: int | None
    epochs: int
    eval_every: int

    @classmethod
    def from_config(cls, config: AnyRunConfig, strategy: type[Strategy]) -> BatchSettings:
        """Return the settings of a training run with this configuration."""
        processes = range(config.train.ranks)
        return cls(
            global_batch_tokens=config.train.global_batch_tokens,
            shuffle=config.data.shuffle,
            seed=config.seed,
            data_parallel_ranks=tuple(
                strategy.data_parallel(config.strategy, process, len(processes)).rank for process in processes
            ),
            accumulation=config.train.accumulation,
            balance=config.train.balance,
            capture_tokens=config.engine.batch_tokens,
            total_steps=config.train.steps,
            epochs=config.train.epochs,
            eval_every=config.train.eval_every,
        )


class BatchSchedule:
    """The global batches of a run, in order, and their division among engines and trainer processes."""

    def __init__(
        self,
        dataset: Dataset,
        settings: BatchSettings,
        part: range | None = None,
        sample_flops: Callable[[int, int], int] | None = None,
    ) -> None:
        """Store the dataset and the settings; batches are computed on demand.

        ``part``: the steps of the run that train on ``dataset``; None for all steps. ``sample_flops``: the
        function of the draft's ``DraftCost``; None if a sample costs as much as it has tokens.
        """
        self.dataset = dataset
        self.settings = settings
        self.sample_flops = sample_flops
        self._part = part
        self._train = EpochBatches(
            dataset.train, settings.global_batch_tokens, seed=settings.seed, shuffle=settings.shuffle
        )
        self._held_out = (
            EpochBatches(dataset.held_out, settings.global_batch_tokens, seed=settings.seed, shuffle=False)
            if dataset.held_out
            else None
        )

    @cached_property
    def total_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        if self.settings.total_steps is not None:
            return self.settings.total_steps
        return self._train.steps_in_epochs(self.settings.epochs)

    @property
    def epochs(self) -> float:
        """Approximate number of passes over the data in the whole run."""
        return self.total_steps / self._train.steps_in_epoch(0)

    @property
    def steps(self) -> range:
        """Optimizer steps that train on this dataset: all steps, or the steps of a cycle (``decode.every``)."""
        return range(self.total_steps) if self._part is None else self._part

    def items(self, done_steps: int) -> Iterator[GlobalBatch]:
        """Yield the global batches that are left after ``done_steps`` optimizer steps, in order."""
        for step in range(done_steps, self.steps.stop):
            yield self.train_item(step)
            if self.evaluates_after(step + 1):
                yield from self.evaluation_items(step + 1)

    def train_item(self, step: int) -> GlobalBatch:
        """Return the global batch of an optimizer step."""
        batch = self._train.batch(step if self._part is None else step - self._part.start)
        return GlobalBatch(step, False, batch.epoch, batch.sample_ids)

    def evaluates_after(self, done_steps: int) -> bool:
        """Return whether the held-out set is evaluated after ``done_steps`` steps."""
        every = self.settings.eval_every
        due = done_steps == self.total_steps or (every > 0 and done_steps % every == 0)
        return due and self._held_out is not None

    def evaluation_items(self, done_steps: int) -> list[GlobalBatch]:
        """Return the whole held-out set as global batches, which contain the same samples at every evaluation."""
        if self._held_out is None:
            return []
        batches = [self._held_out.batch(index) for index in range(self._held_out.steps_in_epoch(0))]
        return [GlobalBatch(done_steps, True, 0, batch.sample_ids) for batch in batches]

    @property
    def num_shares(self) -> int:
        """Number of data-parallel ranks, each of which trains a share of every global batch."""
        return max(self.settings.data_parallel_ranks) + 1

    @lru_cache(maxsize=64)  # noqa: B019 (a schedule lives as long as its process)
    def shares(self, item: GlobalBatch) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the sample ids of each micro-batch of each data-parallel rank.

        Every sample occurs once, and every rank has the same number of micro-batches.
        """
        sizes = self._costs(item) if self.settings.balance == "cost" else self.dataset.lengths
        return shares(item.sample_ids, sizes, self.num_shares, self.settings.accumulation)

    def imbalance(self, item: GlobalBatch) -> float:
        """Return how unevenly the tokens of a batch are distributed over the ranks; 1 is even.

        Ranks wait for each other in every micro-batch. So the tokens of the largest micro-batch of any rank
        are summed over the micro-batches, and the sum is divided by the mean number of tokens of a rank.
        """
        return self._max_over_mean(item, self.dataset.lengths)

    def cost_imbalance(self, item: GlobalBatch) -> float:
        """Return how unevenly the cost of a batch's samples is distributed over the ranks; 1 is even."""
        return self._max_over_mean(item, self._costs(item))

    def _max_over_mean(self, item: GlobalBatch, sizes: Mapping[int, int]) -> float:
        totals = [
            [sum(sizes[sample_id] for sample_id in part) for part in share] for share in self.shares(item)
        ]
        return sum(map(max, zip(*totals, strict=True))) * self.num_shares / sum(map(sum, totals))

    @lru_cache(maxsize=64)  # noqa: B019
    def _costs(self, item: GlobalBatch) -> Mapping[int, int]:
        """Return the cost of training on each sample of ``item``, by sample id."""
        if self.sample_flops is None:
            return self.dataset.lengths
        samples = map(self.dataset.sample, item.sample_ids)
        return {
            sample.sample_id: self.sample_flops(len(sample), int(np.count_nonzero(sample.loss_mask)))
            for sample in samples
        }

    def share(self, item: GlobalBatch, process: int) -> tuple[tuple[int, ...], ...]:
        """Return the sample ids of each micro-batch on which trainer process ``process`` trains."""
        return self.shares(item)[self.settings.data_parallel_ranks[process]]

    @lru_cache(maxsize=64)  # noqa: B019
    def destinations(self, item: GlobalBatch) -> dict[int, tuple[int, ...]]:
        """Return which trainer processes train on each sample of ``item``, by sample id.

        They are all processes of one data-parallel rank.
        """
        return {
            sample_id: processes
            for share, processes in zip(self.shares(item), self._processes, strict=True)
            for part in share
            for sample_id in part
        }

    @cached_property
    def _processes(self) -> list[tuple[int, ...]]:
        """The trainer processes of each data-parallel rank."""
        found: list[list[int]] = [[] for _ in range(self.num_shares)]
        for process, rank in enumerate(self.settings.data_parallel_ranks):
            found[rank].append(process)
        return [tuple(processes) for processes in found]

    def captures(self, item: GlobalBatch) -> list[tuple[int, ...]]:
        """Return the sample ids of each capture batch of ``item``.

        Capture batches do not depend on which rank trains a sample.
        """
        return capture_batches(item.sample_ids, self.dataset.lengths, self.settings.capture_tokens)

    def request_id(self, item: GlobalBatch, sample_id: int) -> int:
        """Return the id of the capture of a sample for the global batch ``item``.

        A sample is captured again in later epochs and evaluations, and two captures of it may run at once.
        The ids for a global batch are higher than the ids for earlier ones. The global batches of one
        evaluation share a range of ids.
        """
        return (2 * item.step + (not item.evaluates)) * len(self.dataset.lengths) + sample_id

    def num_tokens(self, request_id: int) -> int:
        """Return the number of tokens of the sample whose capture has this request id."""
        return self.dataset.lengths[request_id % len(self.dataset.lengths)]

    @lru_cache(maxsize=2)  # noqa: B019
    def denominators(self, items: tuple[GlobalBatch, ...], draft: Draft) -> Tensor:
        """Return the loss denominators, summed over all samples of ``items``; only loss masks are needed.

        The latest results are cached, so that they can be computed ahead of their use.
        """
        import torch

        supervision = [
            self._supervision(self.dataset.sample(sample_id), item)
            for item in items
            for sample_id in item.sample_ids
        ]
        return checked_answer(draft.denominators(supervision), torch.Tensor, draft, "denominators")

    def _supervision(self, sample: Sample, item: GlobalBatch) -> Supervision:
        import torch

        guess_depth = None if item.evaluates else sample.guess_depth
        return Supervision(
            sample_id=sample.sample_id,
            epoch=item.epoch,
            loss_mask=torch.from_numpy(sample.loss_mask),
            guess_depth=None if guess_depth is None else torch.from_numpy(guess_depth).long(),
            seed=self.settings.seed,
            evaluates=item.evaluates,
        )
