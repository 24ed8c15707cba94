"""The labels of a chain's unrolled steps: which rows count, how many, and what each weighs."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch

from spec_core.host_tensors import to_device_async

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core.records import DraftBatch, Supervision


@dataclass(frozen=True)
class SupervisedRows:
    """The labelled (row, step) pairs, by the position u of their teacher; token u + 1 is the label."""

    teacher_R: Tensor
    """int64 [R]: u, an index into the flat batch."""
    first_R: Tensor
    depth_R: Tensor
    """int64 [R]: steps ``first`` ≤ s < ``depth`` are labelled. Row u − 1 − s lies in the document iff s < u, counted
    within the document."""

    @classmethod
    def of(cls, batch: DraftBatch) -> SupervisedRows:
        """Return a batch's labelled pairs, worked out on the CPU: no device is waited for.

        With guess places, a token at place k is the label of step k − 1 alone.
        """
        mask_T = batch.loss_mask_T.cpu()
        place_T = batch.guess_place_T
        columns = [torch.zeros(3, 0, dtype=torch.int64)]
        for span in batch.spans:
            depth_R = 1 + mask_T[span.start + 2 : span.stop].nonzero().squeeze(1)
            teacher_R, first_R = span.start + depth_R, torch.zeros_like(depth_R)
            if place_T is not None:
                place_R = place_T[teacher_R + 1]
                guessed_R = (place_R > 0) & (place_R <= depth_R)
                teacher_R, depth_R = teacher_R[guessed_R], place_R[guessed_R]
                first_R = depth_R - 1
            columns.append(torch.stack([teacher_R, first_R, depth_R]))
        return cls(*to_device_async(torch.cat(columns, dim=1), batch.input_ids_T.device))

    def chunks(self, most: int) -> list[SupervisedRows]:
        """Split into as few chunks as can be, of at most ``most`` positions, and about equal."""
        if not len(self.teacher_R):
            return []
        size = ceil(len(self.teacher_R) / ceil(len(self.teacher_R) / most))
        columns = (self.teacher_R, self.first_R, self.depth_R)
        return [
            SupervisedRows(*chunk) for chunk in zip(*(column.split(size) for column in columns), strict=True)
        ]


def count_labels(supervision: Sequence[Supervision], num_steps: int) -> Tensor:
    """Return float64 [S]: supervised tokens with at least s + 2 tokens before them in their document.

    Of a sample with guess places, only those at place s + 1 count.
    """

    def labels(sample: Supervision, step: int) -> Tensor:
        labelled_T = sample.loss_mask[step + 2 :]
        if sample.guess_place is not None:
            labelled_T = labelled_T & (sample.guess_place[step + 2 :] == step + 1)
        return labelled_T.sum()

    counts = [torch.stack([labels(sample, s) for s in range(num_steps)]) for sample in supervision]
    return sum(counts, torch.zeros(num_steps, dtype=torch.int64)).cpu().double()


def step_weights(denominators: Tensor, decay: float, like: Tensor) -> Tensor:
    """Return [S]: decay^s / n_s for the denominators n, and 0 where nothing is labelled.

    It is on the device of ``like``, in float32 or the dtype of ``like`` where that is wider.
    """
    count = denominators.to(like.device)
    factor = decay ** torch.arange(len(count), device=like.device, dtype=count.dtype)
    weight = torch.where(count > 0, factor / count.clamp(min=1), 0)
    return weight.to(torch.promote_types(like.dtype, torch.float32))
