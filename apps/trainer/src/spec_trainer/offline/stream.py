"""StoredStream yields one trainer rank's micro-batches, in order, from a feature folder."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from spec_core.errors import RunError
from spec_core.resource import Resource
from spec_kit.layers.fp8_features import decode_features
from spec_trainer.run.feature_stream import lay_out

if TYPE_CHECKING:
    from spec_core.records import DraftBatch, Span
    from spec_trainer.offline.store import FeatureStore
    from spec_trainer.run.batch_schedule import GlobalBatch
    from spec_trainer.run.spec import RunSpec

_HOST = torch.device("cpu")
_READERS = 4
"""Threads that read samples and verify checksums; both release the GIL."""


class StoredStream(Resource):
    """A BatchSource that reads the next batch from the folder while the trainer computes."""

    def __init__(self, run: RunSpec, rank: int, store: FeatureStore, device: torch.device) -> None:
        """Prepare to read the samples on which ``rank`` trains from ``store``, and to copy them to ``device``."""
        self._run = run
        self._rank = rank
        self._device = device
        self._places = store.places
        every = store.schema.layers == run.schema.layers
        chosen = [store.schema.layers.index(layer) for layer in run.schema.layers]
        self._columns = slice(None) if every else chosen  # a slice copies nothing
        self._ready: tuple[GlobalBatch, Future[list[DraftBatch]]] | None = None
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="read ahead")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read features")

    def prepare(self, item: GlobalBatch) -> None:
        """Start to read this rank's micro-batches of ``item`` in a thread."""
        self._ready = item, self._ahead.submit(self._read, item)

    def micro_batches(self, item: GlobalBatch) -> list[DraftBatch]:
        """Return this rank's micro-batches of ``item``.

        Raise RunError for features that are damaged or were captured from other tokens.
        """
        if self._ready is None or self._ready[0] != item:
            self.prepare(item)
        assert self._ready is not None
        return [batch.to(self._device) for batch in self._ready[1].result()]

    def check(self) -> None:
        """Do nothing, because ``micro_batches`` has already compared the token ids."""

    def fail(self, error: BaseException) -> None:
        """Do nothing, because no engine sends features."""

    def close(self) -> None:
        """Stop the threads."""
        self._ahead.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def _read(self, item: GlobalBatch) -> list[DraftBatch]:
        run = self._run
        batches = lay_out(run.schedule, item, self._rank, run.schema, run.config, _HOST)
        places = [(batch, span) for batch in batches for span in batch.spans]
        for _ in self._readers.map(self._place, *zip(*places, strict=True)) if places else ():
            pass
        return batches if self._device == _HOST else [batch.pinned() for batch in batches]

    def _place(self, batch: DraftBatch, span: Span) -> None:
        shard, sample = self._places[span.sample_id]
        hidden_TNH, ids_T = shard.read(sample)
        where = slice(span.start, span.stop)
        if not torch.equal(ids_T, batch.input_ids_T[where]):
            raise RunError(
                f"{shard.file}: sample {sample.sample_id} has other tokens than the data; capture anew"
            )
        decode_features(hidden_TNH[:, self._columns], batch.hidden_TNH[where])
