"""FeatureStream fills the micro-batches of one trainer process with features that engines send.

``offline/stream.py`` reads stored features from a folder instead.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch

from spec_core.errors import DeadlineExceeded, EngineError, PeerLost, ProtocolError
from spec_core.wording import counted
from spec_kit.layers.fp8_features import decode_features
from spec_trainer.data.packing import empty_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_core import FeatureReceiver
    from spec_core.records import DraftBatch, FeatureSample, FeatureSchema, Span
    from spec_trainer.configuration.run import AnyRunConfig
    from spec_trainer.run.batch_schedule import BatchSchedule, GlobalBatch


log = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Interface of a source of one trainer process's micro-batches.

    The training loop requests each item of the schedule once, in order.
    """

    def prepare(self, item: GlobalBatch) -> None:
        """Begin to fill ``item``'s micro-batches with features that have arrived, without waiting for others.

        Meanwhile the device trains on the previous item.

        Calling it is optional.
        """

    def micro_batches(self, item: GlobalBatch) -> list[DraftBatch]:
        """Return this process's micro-batches of ``item``, on the process's device."""

    def check(self) -> None:
        """Raise RunError if the token ids that came with features differ from the samples' token ids.

        The call synchronizes with the device, so the loop makes it after another synchronization.
        """

    def fail(self, error: BaseException) -> None:
        """Make each wait for features that have not arrived raise EngineError. Thread-safe."""


def lay_out(
    schedule: BatchSchedule,
    item: GlobalBatch,
    rank: int,
    schema: FeatureSchema,
    config: AnyRunConfig,
    device: torch.device,
) -> list[DraftBatch]:
    """Return a process's micro-batches of ``item`` on ``device``, whose features are zero until filled."""
    return [
        empty_batch(
            [schedule.dataset.sample(sample_id) for sample_id in part],
            schema,
            packing=config.data.packing,
            seed=config.seed,
            epoch=item.epoch,
            evaluates=item.evaluates,
            device=device,
        )
        for part in schedule.share(item, rank)
    ]


class FeatureStream:
    """Micro-batches that are filled with the samples of a receiver.

    A batch is allocated first, and each sample is copied into it on arrival. So there is one copy, and the
    transport's memory is free again at once. Samples of later items that arrive early stay in the transport. If
    features arrive on the device, the CPU waits only for senders, not for the device.
    """

    def __init__(
        self,
        schedule: BatchSchedule,
        rank: int,
        receiver: FeatureReceiver,
        schema: FeatureSchema,
        config: AnyRunConfig,
        device: torch.device,
        released: Callable[..., None],
    ) -> None:
        """Store the inputs. The stream calls ``released`` with samples whose transport memory is free.

        The arguments are the rank and the request ids. It is called before every wait for another sample, because
        that sample may need this memory.
        """
        self._schedule = schedule
        self._rank = rank
        self._receiver = receiver
        self._schema = schema
        self._config = config
        self._device = device
        self._released = released
        self._item: GlobalBatch | None = None
        self._batches: list[DraftBatch] = []
        self._places: dict[int, tuple[DraftBatch, Span]] = {}
        """Request id -> batch and span of each sample of ``_item`` whose features have not arrived."""
        self._early: dict[int, FeatureSample] = {}
        self._first_id = 0
        """Least request id of ``_item``."""
        self._placed: set[int] = set()
        """Request ids, from ``_first_id`` on, whose features were copied into a batch."""
        self._freed: list[int] = []
        """Request ids of freed samples that were not reported by ``released`` yet."""
        self._same_tokens: list[tuple[int, Tensor]] = []
        """(sample id, bool tensor on the device): whether the captured token ids equal the sample's."""
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Make each wait for features raise EngineError, because of ``error``.

        A thread of an engine calls this method.
        """
        self._failure = error
        self._receiver.close()

    def prepare(self, item: GlobalBatch) -> None:
        """Allocate ``item``'s micro-batches and copy the samples that have arrived into them."""
        self._item = item
        if (first := self._schedule.request_id(item, 0)) != self._first_id:
            self._first_id = first
            self._placed.clear()
        self._batches = lay_out(self._schedule, item, self._rank, self._schema, self._config, self._device)
        self._places = {
            self._schedule.request_id(item, span.sample_id): (batch, span)
            for batch in self._batches
            for span in batch.spans
        }
        for request_id in self._early.keys() & self._places.keys():
            self._place(self._early.pop(request_id))
        with suppress(DeadlineExceeded):
            self._take(0.0)

    def micro_batches(self, item: GlobalBatch) -> list[DraftBatch]:
        """Return this process's micro-batches of ``item``, after all their features have arrived.

        It waits for at most ``timeouts.step_s``.
        """
        if self._item != item:
            self.prepare(item)
        try:
            self._take(self._config.timeouts.step_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"rank {self._rank}: {counted(len(self._places), 'sample')} of step {item.step} did not arrive "
                f"within timeouts.step_s={self._config.timeouts.step_s}"
            ) from error
        return self._batches

    def check(self) -> None:
        """Raise ProtocolError if features came with other token ids than the tokens of their sample."""
        checks, self._same_tokens = self._same_tokens, []
        if checks and not torch.stack([same for _, same in checks]).all():
            raise _other_tokens(next(sample_id for sample_id, same in checks if not same))

    def _take(self, timeout_s: float) -> None:
        """Copy all missing samples into the micro-batches; raise DeadlineExceeded if they do not come in time."""
        deadline = time.monotonic() + timeout_s
        while self._places:
            sample = self._next(deadline)
            if sample.request_id in self._places:
                self._place(sample)
            elif self._has_come_before(sample.request_id):
                self._receiver.release(sample)
            else:
                self._early[sample.request_id] = sample
        self._report_freed()

    def _next(self, deadline: float) -> FeatureSample:
        """Return the next sample that arrives. Before it waits, it reports the freed memory."""
        if self._freed:
            with suppress(DeadlineExceeded):
                return self._receive(0.0)
            self._report_freed()
        return self._receive(max(0.0, deadline - time.monotonic()))

    def _report_freed(self) -> None:
        if self._freed:
            self._released(self._rank, *self._freed)
            self._freed.clear()

    def _has_come_before(self, request_id: int) -> bool:
        """Return whether features with this request id arrived before; a lost engine may have sent them."""
        return request_id < self._first_id or request_id in self._placed or request_id in self._early

    def _receive(self, timeout_s: float) -> FeatureSample:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._receiver.receive(max(0.0, deadline - time.monotonic()))
            except PeerLost as error:
                if self._failure is not None:
                    raise EngineError(f"capture failed: {self._failure}") from self._failure
                # The engine is in another process: its batches are captured again, or the run ends.
                log.warning("%s", error)

    def _place(self, sample: FeatureSample) -> None:
        batch, span = self._places.pop(sample.request_id)
        self._placed.add(sample.request_id)
        where = slice(span.start, span.stop)
        if len(sample.input_ids) != span.stop - span.start:
            raise _other_tokens(span.sample_id)
        same = (sample.input_ids.to(self._device) == batch.input_ids_T[where]).all()
        self._same_tokens.append((span.sample_id, same))
        decode_features(sample.hidden_TNH, batch.hidden_TNH[where])
        self._receiver.release(sample)
        self._freed.append(sample.request_id)


def _other_tokens(sample_id: int) -> ProtocolError:
    return ProtocolError(f"the engine captured other tokens than sample {sample_id} has")
