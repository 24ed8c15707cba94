"""FeatureStream: one trainer rank's micro-batches, in the plan's order, from a receiver. (From a folder:
``offline/stream.py``.)"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

from spec_core.errors import DeadlineExceeded, EngineError, PeerLost, ProtocolError
from spec_trainer.data.packing import empty_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core import FeatureReceiver
    from spec_core.records import DraftBatch, FeatureSample, FeatureSchema, Span
    from spec_trainer.config import AnyRunConfig
    from spec_trainer.work_plan import WorkItem, WorkPlan


class BatchSource(Protocol):
    """What a trainer rank trains on, wherever the features come from."""

    def micro_batches(self, item: WorkItem) -> list[DraftBatch]:
        """This rank's part of ``item``. Asked for once per item, in the plan's order."""


def lay_out(
    plan: WorkPlan, item: WorkItem, rank: int, schema: FeatureSchema, config: AnyRunConfig
) -> list[DraftBatch]:
    """A rank's micro-batches of ``item``: everything in place but the features, which are zero."""
    return [
        empty_batch(
            [plan.dataset.sample(sample_id) for sample_id in part],
            schema,
            packing=config.data.packing,
            seed=config.seed,
            epoch=item.epoch,
        )
        for part in plan.shares(item)[rank]
    ]


class FeatureStream:
    """Lays a batch out first and copies each sample to its place as it arrives: one copy, and the transport's
    memory is free again at once. Samples of later items that arrive early wait in the transport."""

    def __init__(
        self,
        plan: WorkPlan,
        rank: int,
        receiver: FeatureReceiver,
        schema: FeatureSchema,
        config: AnyRunConfig,
        released: Callable[[int, int], None],
    ) -> None:
        """``released(rank, num_tokens)`` is told of every sample whose transport memory is free."""
        self._plan = plan
        self._rank = rank
        self._receiver = receiver
        self._schema = schema
        self._config = config
        self._released = released
        self._early: dict[int, FeatureSample] = {}
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Ends a wait for features that will never come; called from an engine's thread."""
        self._failure = error
        self._receiver.close()

    def micro_batches(self, item: WorkItem) -> list[DraftBatch]:
        """This rank's part of ``item``; waits for its features at most ``timeouts.step_s``."""
        batches = lay_out(self._plan, item, self._rank, self._schema, self._config)
        places = {
            self._plan.capture_id(item, span.sample_id): (batch, span)
            for batch in batches
            for span in batch.spans
        }
        for capture_id in [known for known in self._early if known in places]:
            self._place(self._early.pop(capture_id), *places.pop(capture_id))
        deadline = time.monotonic() + self._config.timeouts.step_s
        while places:
            sample = self._receive(deadline, len(places), item)
            place = places.pop(sample.sample_id, None)
            if place is None:
                self._early[sample.sample_id] = sample
            else:
                self._place(sample, *place)
        return batches

    def _receive(self, deadline: float, missing: int, item: WorkItem) -> FeatureSample:
        try:
            return self._receiver.receive(max(0.0, deadline - time.monotonic()))
        except PeerLost as error:
            if self._failure is None:  # another process, which may yet tell what it has died of
                raise PeerLost(f"capture failed: {error}") from error
            raise EngineError(f"capture failed: {self._failure}") from self._failure
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"rank {self._rank}: {missing} samples of step {item.step} did not arrive within "
                f"timeouts.step_s={self._config.timeouts.step_s}"
            ) from error

    def _place(self, sample: FeatureSample, batch: DraftBatch, span: Span) -> None:
        where = slice(span.start, span.stop)
        if not torch.equal(sample.input_ids.cpu(), batch.input_ids_T[where]):
            raise ProtocolError(f"the engine captured other tokens than sample {sample.sample_id} has")
        batch.hidden_TNH[where].copy_(sample.hidden_TNH)
        self._receiver.release(sample)
        self._released(self._rank, span.stop - span.start)
