"""CaptureRun is a run whose steps write shards of features instead of training.

It uses the batch schedule, dispatcher, engines and feature stream of training. Shards (files of samples) replace
global batches, and a writer replaces the trainer. Data and settings determine the samples of each shard, so an
interrupted capture continues with the missing shards.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spec_trainer.base.stop_request import Interrupted
from spec_trainer.data.dataset import Dataset
from spec_trainer.offline.folder import FeatureFolder
from spec_trainer.offline.index import FeatureIdentity, data_digest
from spec_trainer.run.batch_schedule import BatchSchedule, BatchSettings
from spec_trainer.run.dispatch import sample_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spec_trainer.run.batch_schedule import GlobalBatch
    from spec_trainer.run.feature_stream import BatchSource
    from spec_trainer.run.spec import RunParts, RunSpec


class ShardSchedule(BatchSchedule):
    """Batch schedule that visits every sample once, in data order; its items are the missing shards."""

    def __init__(self, dataset: Dataset, settings: BatchSettings, folder: FeatureFolder) -> None:
        """Divide ``dataset`` into shards as ``settings`` say; shards that exist in ``folder`` are left out."""
        super().__init__(Dataset(dataset.samples, (), dataset.report), settings)
        self._folder = folder

    def items(self, done_steps: int) -> Iterator[GlobalBatch]:
        """Return the missing shards whose number is ``done_steps`` or higher."""
        return (item for item in super().items(done_steps) if not self._folder.has(item.step))


@dataclass(frozen=True)
class CaptureRun:
    """A capture: its run, its output folder, and the identity of the features."""

    run: RunSpec
    folder: FeatureFolder
    identity: FeatureIdentity

    @property
    def num_shards(self) -> int:
        """Number of shards of the complete folder."""
        return self.run.schedule.total_steps

    def missing(self) -> list[GlobalBatch]:
        """Return the shards that are missing in the folder."""
        return list(self.run.schedule.items(0))

    def num_bytes(self, items: Sequence[GlobalBatch]) -> int:
        """Return the size in bytes of the features of the shards ``items``."""
        return sample_bytes(self.run.schema, self.num_tokens(items))

    def num_tokens(self, items: Sequence[GlobalBatch]) -> int:
        """Return the number of tokens in the shards ``items``."""
        lengths = self.run.dataset.lengths
        return sum(lengths[sample_id] for item in items for sample_id in item.sample_ids)


def plan_capture(parts: RunParts, dataset: Dataset) -> CaptureRun:
    """Return the CaptureRun for a dataset. Every process of a capture computes an equal CaptureRun."""
    config = parts.config
    folder = FeatureFolder(config.output)
    settings = BatchSettings(
        global_batch_tokens=max(1, config.capture.shard_bytes // sample_bytes(parts.schema, 1)),
        shuffle=False,
        seed=0,
        data_parallel_ranks=(0,),
        accumulation=1,
        balance="tokens",
        capture_tokens=config.engine.batch_tokens,
        total_steps=None,
        epochs=1,
        eval_every=0,
    )
    schedule = ShardSchedule(dataset, settings, folder)
    identity = FeatureIdentity(
        schema=parts.schema,
        target_digest=parts.target.digest,
        data_digest=data_digest(dataset),
        num_samples=len(dataset.samples),
        shard_bytes=config.capture.shard_bytes,
    )
    return CaptureRun(replace(parts.with_schedule(schedule), stores=True), folder, identity)


def write_shards(
    capture: CaptureRun,
    stream: BatchSource,
    should_stop: Callable[[int], bool],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Write the missing shards to disk, with the samples that arrive by ``stream``.

    One shard is written while the samples of the next shard arrive. ``show`` gets the figures of each shard, for the
    progress display.
    """
    from spec_trainer.offline.shard import write_shard

    missing = capture.missing()
    samples = capture.run.dataset.samples
    written: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="shard") as disk:
        for number, item in enumerate(missing, start=1):
            since = time.monotonic()
            (batch,) = stream.micro_batches(item)
            stream.check()
            if written is not None:
                written.result()
            images = {span.sample_id: samples[span.sample_id].images for span in batch.spans}
            written = disk.submit(
                write_shard, capture.folder.shard(item.step), batch, capture.identity, images
            )
            tokens_per_s = capture.num_tokens([item]) / (time.monotonic() - since)
            show({"step": number, "tokens_per_s": tokens_per_s})
            if should_stop(number) and number < len(missing):
                written.result()
                raise Interrupted(
                    f"interrupted; shards left: {len(missing) - number} of {capture.num_shards}; the same command "
                    "goes on there"
                )
        if written is not None:
            written.result()
