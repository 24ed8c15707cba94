"""Build the tensors of micro-batches: documents along one token axis, packed or padded to the longest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_core.records import DraftBatch, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core.records import FeatureSchema
    from spec_trainer.data.dataset import Sample

_HOST = torch.device("cpu")
_PADDING_TOKENS = 8  # of a batch without samples: kernels dislike empty tensors


def empty_batch(
    samples: Sequence[Sample],
    schema: FeatureSchema,
    *,
    packing: bool,
    seed: int,
    epoch: int,
    evaluates: bool = False,
    device: torch.device = _HOST,
) -> DraftBatch:
    """Return a batch of ``samples`` on ``device`` with token ids, masks and spans; its features are zero.

    The caller copies each sample's features into the sample's span of ``hidden_TNH``; padding stays zero.
    Without samples the batch has a few padding tokens. ``evaluates``: see ``DraftBatch``.
    """
    spans, num_tokens = _lay_out(samples, packing, epoch)
    elsewhere = device != _HOST  # the copy from pinned memory is asynchronous
    input_ids_T = torch.zeros(num_tokens, dtype=torch.int64, pin_memory=elsewhere)
    loss_mask_T = torch.zeros(num_tokens, dtype=torch.bool)
    for sample, span in zip(samples, spans, strict=True):
        input_ids_T[span.start : span.stop] = torch.from_numpy(sample.input_ids)
        loss_mask_T[span.start : span.stop] = torch.from_numpy(sample.loss_mask)
    guess_depth_T = None if evaluates else _guess_depths(samples, spans, num_tokens)
    hidden_TNH = torch.zeros(schema.shape(num_tokens), dtype=schema.torch_dtype(), device=device)
    batch = DraftBatch(
        input_ids_T=input_ids_T,
        hidden_TNH=hidden_TNH,
        loss_mask_T=loss_mask_T,
        spans=spans,
        guess_depth_T=guess_depth_T,
        seed=seed,
        evaluates=evaluates,
    )
    return batch.to(device)


def _guess_depths(samples: Sequence[Sample], spans: Sequence[Span], num_tokens: int) -> torch.Tensor | None:
    """Return ``guess_depth`` of all samples as int64 [T], 0 outside every span; None if no sample has it."""
    if all(sample.guess_depth is None for sample in samples):
        return None
    guess_depth_T = torch.zeros(num_tokens, dtype=torch.int64)
    for sample, span in zip(samples, spans, strict=True):
        if sample.guess_depth is not None:
            guess_depth_T[span.start : span.stop] = torch.from_numpy(sample.guess_depth)
    return guess_depth_T


def _lay_out(samples: Sequence[Sample], packing: bool, epoch: int) -> tuple[tuple[Span, ...], int]:
    """Return the span of each sample in a batch, and the batch's number of tokens with padding."""
    width = max((len(sample) for sample in samples), default=_PADDING_TOKENS)
    spans: list[Span] = []
    start = 0
    for sample in samples:
        stop = start + len(sample)
        spans.append(Span(sample_id=sample.sample_id, epoch=epoch, start=start, stop=stop))
        start = stop if packing else start + width
    return tuple(spans), start or width
