"""FiniteFeatures masks samples whose features have NaN, infinity or values too large to square.

A live request may make the target compute such features, above all in a 16-bit dtype. Such a request must not end the
run.
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
    """Return a copy of ``links`` whose feature stream masks samples with NaN or infinite features.

    ``links`` connects a trainer rank with the rest of the run. The ids of the masked samples are appended to the
    list ``links.result["not_finite"]``.
    """
    not_finite = links.result.setdefault("not_finite", [])
    return replace(links, stream=FiniteFeatures(links.stream, not_finite))


class FiniteFeatures:
    """A BatchSource that sets all features and loss masks of a sample to zero if a feature is not finite."""

    def __init__(self, source: BatchSource, not_finite: list[int]) -> None:
        """Prepare to pass on the batches of ``source``, the feature stream that this object wraps.

        ``not_finite``: list to which the ids of the masked samples are appended.
        """
        self._source = source
        self._not_finite = not_finite

    def prepare(self, item: GlobalBatch) -> None:
        """Let the wrapped stream begin to fill the batches of ``item``."""
        self._source.prepare(item)

    def micro_batches(self, item: GlobalBatch) -> list[DraftBatch]:
        """Wait for the batches of ``item``, mask samples with NaN or infinite features; return the batches."""
        batches = self._source.micro_batches(item)
        for batch in batches:
            for span in batch.spans:
                rows = slice(span.start, span.stop)
                # A norm squares features in float32; the sum is finite only if every square is.
                if not batch.hidden_TNH[rows].float().square().mean().isfinite():
                    batch.hidden_TNH[rows] = 0
                    batch.loss_mask_T[rows] = False
                    self._not_finite.append(span.sample_id)
        return batches

    def check(self) -> None:
        """Let the wrapped stream check the token ids that came with features (``BatchSource.check``)."""
        self._source.check()

    def fail(self, error: BaseException) -> None:
        """Make each wait for features that have not arrived raise EngineError, because of ``error``."""
        self._source.fail(error)
