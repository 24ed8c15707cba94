"""The Dispatcher sends capture batches to engines, in order, while each rank's window has space.

The window is the memory for a rank's features in flight, limited in bytes. The order of the schedule prevents a
deadlock. A sample is dispatched only when it fits into the window together with all unreleased *earlier* samples. So
the sample that a rank waits for always fits, however slow its engine is.

If an engine is lost, its batches are captured again, unchanged and whole, so that the features are the same
bit for bit. A rank may then receive a sample twice, and drops one copy. So the window's bytes for a sample
become free only once the rank has released it *and* its batch is captured.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from abc import abstractmethod
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError, SpecError
from spec_core.records import CaptureRequest
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spec_core import Engine
    from spec_core.records import FeatureSchema
    from spec_trainer.data.dataset import Dataset
    from spec_trainer.run.batch_schedule import BatchSchedule, GlobalBatch
    from spec_trainer.run.spec import RunSpec

    Capturer = Callable[[Sequence["SampleReference"]], Future[None]]
    """Begins to capture a batch with one engine, which may be in another process. The future is done when every
    sample was sent."""

_QUEUED_PER_ENGINE = 2
"""Capture batches per engine: one in computation and one queued, so that the engine never idles."""


@dataclass(frozen=True)
class SampleReference:
    """A sample to capture. Its token ids are in the run's dataset."""

    request_id: int
    sample_id: int
    destinations: tuple[str, ...]
    """Receiver addresses of the trainer processes that train the sample."""


@dataclass(eq=False)
class _Batch:
    """Samples that one engine captures together, and their state."""

    number: int
    """Position in the schedule's order."""
    samples: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Request id and sample id of each sample."""
    waiting: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Request id -> the ranks that have not released the sample."""
    need: Counter[int] = field(default_factory=Counter[int])
    """Rank -> bytes of the rank's window that the samples take."""
    released: Counter[int] = field(default_factory=Counter[int])
    """Rank -> bytes that the rank released before the batch was captured."""
    captured: bool = False
    """Whether the engine has captured and sent the batch; it may not have arrived completely."""


class CapturerSource(Resource):
    """Interface of a source of features that replaces the engine, for runs in one process."""

    @abstractmethod
    def capturer(self, part: RunSpec) -> Capturer:
        """Return the Capturer of the samples of ``part``, a run or one of its cycles."""


def capture_from(
    dataset: Dataset, engine: Engine, schema: FeatureSchema, samples: Sequence[SampleReference]
) -> Future[None]:
    """Begin to capture a batch with an engine in this process; the future is done when every sample was sent.

    The token ids are taken from ``dataset``; ``schema`` says which features to capture.
    """
    requests = [
        CaptureRequest(
            request_id=sample.request_id,
            input_ids=tuple(dataset.sample(sample.sample_id).input_ids.tolist()),
            destinations=sample.destinations,
            images=dataset.sample(sample.sample_id).images,
        )
        for sample in samples
    ]
    return engine.capture(requests, schema)


def sample_bytes(schema: FeatureSchema, num_tokens: int) -> int:
    """Return the number of bytes of one sample in a transport: hidden states and int64 token ids."""
    return num_tokens * (schema.sent.bytes_per_token() + 8)


def check_sizes(schedule: BatchSchedule, schema: FeatureSchema, window_bytes: int) -> None:
    """Raise ConfigError if a sample is larger than the window, or too long for one forward pass."""
    for sample_id, length in schedule.dataset.lengths.items():
        if length > schedule.settings.capture_tokens:
            raise ConfigError(
                f"engine.batch_tokens={schedule.settings.capture_tokens} is smaller than sample {sample_id} "
                f"({length} tokens); raise it to {length} or lower data.max_length"
            )
        size = sample_bytes(schema, length)
        if size > window_bytes:
            raise ConfigError(
                f"placement.window_bytes={window_bytes} is smaller than sample {sample_id} ({length} tokens, "
                f"{size} bytes of features); raise it to {size} or lower data.max_length"
            )


class Dispatcher:
    """Dispatches capture batches to engines. Thread-safe; engines call back from their own threads."""

    def __init__(
        self,
        schedule: BatchSchedule,
        schema: FeatureSchema,
        engines: Sequence[Capturer],
        addresses: Sequence[str],
        window_bytes: int,
    ) -> None:
        """Prepare to dispatch to ``engines``; nothing is sent before ``start``.

        ``addresses``: address of each rank's receiver. ``window_bytes``: most bytes in flight to each rank.
        """
        self._schedule = schedule
        self._token_bytes = sample_bytes(schema, 1)
        self._engines = engines
        self._addresses = addresses
        self._window_bytes = window_bytes
        self._used_bytes = [0] * len(addresses)
        self._numbers = itertools.count()
        self._running: list[list[_Batch]] = [[] for _ in engines]
        """Batches that each engine has received and not captured yet."""
        self._sent: list[list[_Batch]] = [[] for _ in engines]
        """Batches that each engine has captured; ranks may not have released some of their samples yet."""
        self._free = [
            (queued, engine) for queued in range(_QUEUED_PER_ENGINE) for engine in range(len(engines))
        ]
        """Heap of free queue slots of engines, as (number of batches that the engine already has, engine)."""
        self._num_busy = 0
        """Number of engines with a running capture."""
        self._busy_s = 0.0
        """Seconds of all finished captures, minus the start time of each running capture."""
        self._batch_of: dict[int, _Batch] = {}
        """Request id -> the batch, until every rank has released the sample."""
        self._batches: Iterator[_Batch] = iter(())
        self._waiting: _Batch | None = None
        """The next batch, which does not fit into the window yet."""
        self._lost: list[_Batch] = []
        """Batches to capture again, in order; their window bytes are still reserved."""
        self._stopped = False
        self._lock = threading.RLock()

    def start(
        self, items: Iterable[GlobalBatch], failed: Callable[[BaseException], None] | None = None
    ) -> None:
        """Begin to dispatch ``items``; later items follow as memory in the windows becomes free.

        ``failed`` is called with the first error of any engine in this process; nothing is dispatched after
        it. If an engine in another process fails, the caller must call ``lost`` instead.
        """
        self._failed = failed
        self._batches = (batch for item in items for batch in self._requests(item))
        self._pump()

    def released(self, rank: int, *request_ids: int) -> None:
        """Free the window's bytes of samples that a rank has released.

        If a sample's batch is not captured yet, its bytes become free once it is.
        """
        with self._lock:
            for request_id in request_ids:
                self._release(rank, request_id)
        self._pump()

    def lost(self, engine: int) -> None:
        """Let other engines capture the batches of a lost engine again, if ranks still need them.

        The engine may have died while it sent them. It gets no batches until ``regained`` is called.
        """
        with self._lock:
            # What it has captured, too: it may have died before the last bytes arrived.
            again = [*self._running[engine], *(batch for batch in self._sent[engine] if batch.waiting)]
            self._lost = sorted([*self._lost, *again], key=lambda batch: batch.number)
            if self._running[engine]:
                self._note_busy(-1)
            for batch in again:
                batch.captured = False
            self._running[engine], self._sent[engine] = [], []
            # Its places in the queue; ``regained`` puts them back.
            self._free = [(others, free) for others, free in self._free if free != engine]
            heapq.heapify(self._free)
        self._pump()

    def regained(self, engine: int) -> None:
        """Resume sending batches to an engine that was lost and has been replaced."""
        with self._lock:
            for queued in range(_QUEUED_PER_ENGINE):
                heapq.heappush(self._free, (queued, engine))
        self._pump()

    @property
    def busy_s(self) -> float:
        """Seconds that engines have spent on captures so far, summed over engines."""
        with self._lock:
            return self._busy_s + self._num_busy * time.monotonic()

    def stop(self) -> None:
        """Dispatch no more batches."""
        with self._lock:
            self._stopped = True

    def _requests(self, item: GlobalBatch) -> Iterator[_Batch]:
        """Yield the capture batches of a global batch.

        A batch that is larger than a rank's window is divided.
        """
        destinations = self._schedule.destinations(item)
        for sample_ids in self._schedule.captures(item):
            batch = _Batch(next(self._numbers))
            for sample_id in sample_ids:
                ranks = destinations[sample_id]
                size = self._schedule.dataset.lengths[sample_id] * self._token_bytes
                if any(batch.need[rank] + size > self._window_bytes for rank in ranks):
                    yield batch
                    batch = _Batch(next(self._numbers))
                for rank in ranks:
                    batch.need[rank] += size
                request_id = self._schedule.request_id(item, sample_id)
                batch.samples.append((request_id, sample_id))
                batch.waiting[request_id] = list(ranks)
            yield batch

    def _pump(self) -> None:
        """Send batches to engines as long as an engine is free and the next batch fits into the window."""
        while True:
            with self._lock:
                start = self._next()
            if start is None:
                return
            engine, batch, samples = start
            # Without the lock: an engine that takes its time to accept a batch delays no release.
            self._capture(engine, samples).add_done_callback(
                lambda done, engine=engine, batch=batch: self._finished(engine, batch, done)
            )

    def _capture(self, engine: int, samples: Sequence[SampleReference]) -> Future[None]:
        """Let an engine capture a batch; if the engine raises an exception at once, return a failed future.

        The caller may be the thread of another engine, in which an exception would be lost.
        """
        try:
            return self._engines[engine](samples)
        except SpecError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def _next(self) -> tuple[int, _Batch, list[SampleReference]] | None:
        if self._stopped or not self._free:
            return None
        # Lost batches first: a rank may wait for them, and their bytes are reserved already.
        batch = self._lost.pop(0) if self._lost else self._admitted()
        if batch is None:
            return None
        _, engine = heapq.heappop(self._free)
        if not self._running[engine]:
            self._note_busy(1)
        self._running[engine].append(batch)
        return engine, batch, self._references(batch)

    def _references(self, batch: _Batch) -> list[SampleReference]:
        """Return all samples of a batch, each with the addresses of the ranks that have not released it.

        In a batch that is captured again, a sample may have no address.
        """
        return [
            SampleReference(
                request_id=request_id,
                sample_id=sample_id,
                destinations=tuple(self._addresses[rank] for rank in batch.waiting.get(request_id, ())),
            )
            for request_id, sample_id in batch.samples
        ]

    def _admitted(self) -> _Batch | None:
        """Reserve window bytes for the next batch of the schedule, and return the batch.

        Return None if the batch does not fit yet.
        """
        self._waiting = self._waiting or next(self._batches, None)
        if self._waiting is None:
            return None
        batch = self._waiting
        # A smaller batch behind it must not overtake it, or it might wait for ever.
        if any(self._used_bytes[rank] + size > self._window_bytes for rank, size in batch.need.items()):
            return None
        self._waiting = None
        for rank, size in batch.need.items():
            self._used_bytes[rank] += size
        for request_id in batch.waiting:
            self._batch_of[request_id] = batch
        return batch

    def _release(self, rank: int, request_id: int) -> None:
        size = self._schedule.num_tokens(request_id) * self._token_bytes
        batch = self._batch_of[request_id]
        batch.waiting[request_id].remove(rank)
        if not batch.waiting[request_id]:
            # Every rank has it, so it is not sent again if the engine is lost.
            del batch.waiting[request_id], self._batch_of[request_id]
        if batch.captured:
            self._used_bytes[rank] -= size
        else:
            # The engine may still be lost, and then the batch is captured again into these bytes.
            batch.released[rank] += size

    def _note_busy(self, change: int) -> None:
        self._num_busy += change
        self._busy_s -= change * time.monotonic()

    def _finished(self, engine: int, batch: _Batch, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            self._running[engine].remove(batch)
            heapq.heappush(self._free, (len(self._running[engine]), engine))
            if not self._running[engine]:
                self._note_busy(-1)
            batch.captured = True
            # Batches that every rank has released need no second capture if the engine is lost.
            self._sent[engine] = [*(sent for sent in self._sent[engine] if sent.waiting), batch]
            for rank, size in batch.released.items():
                self._used_bytes[rank] -= size
            batch.released.clear()
            # Later errors follow from the first one.
            first = error is not None and not self._stopped
            self._stopped = self._stopped or error is not None
        if error is not None and first and self._failed is not None:
            self._failed(error)
        self._pump()
