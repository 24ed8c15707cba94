"""FiniteFeatures removes samples from batches if their features have NaN, infinity or values too large to square.

A live request may make the target compute such features, above all in a 16-bit dtype. It must not end the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_core.records import DraftBatch
    from spec_trainer.run.batch_schedule import GlobalBatch
    from spec_trainer.run.feature_stream import BatchSource
    from spec_trainer.training.wiring import RankLinks


def with_finite_features(links: RankLinks) -> RankLinks:
    """Return a version of ``links`` that gives only samples with finite features.

    Sample ids of the others are added to the list ``links.result["not_finite"]``.
    """
    not_finite = links.result.setdefault("not_finite", [])
    return replace(links, stream=FiniteFeatures(links.stream, not_finite))


class FiniteFeatures:
    """A BatchSource that sets features that are not finite to zero, and their samples' loss masks to False."""

    def __init__(self, source: BatchSource, not_finite: list[int]) -> None:
        """Take batches from ``source``; add the ids of samples whose features are not finite to ``not_finite``."""
        self._source, self._not_finite = source, not_finite

    def prepare(self, item: GlobalBatch) -> None:
        """Begin to fill the batches of ``item``."""
        self._source.prepare(item)

    def micro_batches(self, item: GlobalBatch) -> list[DraftBatch]:
        """Return the batches of ``item``; wait for their features, and for the device."""
        batches = self._source.micro_batches(item)
        for batch in batches:
            for span in batch.spans:
                rows = slice(span.start, span.stop)
                # A norm squares them, in float32; the sum is finite only if every square is.
                if not batch.hidden_TNH[rows].float().square().mean().isfinite():
                    batch.hidden_TNH[rows] = 0
                    batch.loss_mask_T[rows] = False
                    self._not_finite.append(span.sample_id)
        return batches

    def check(self) -> None:
        """Raise RunError if the wrapped source does."""
        self._source.check()

    def fail(self, error: BaseException) -> None:
        """End every wait for features, as the source does."""
        self._source.fail(error)
