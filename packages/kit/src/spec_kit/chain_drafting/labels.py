"""The labels of a chain's unrolled steps: which rows count, how many, and what each weighs; which rows they need."""

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
        return cls(*to_device_async(_labelled(batch), batch.input_ids_T.device))

    def chunks(self, most: int) -> list[SupervisedRows]:
        """Split into as few chunks as can be, of at most ``most`` positions, and about equal."""
        if not len(self.teacher_R):
            return []
        size = ceil(len(self.teacher_R) / ceil(len(self.teacher_R) / most))
        columns = (self.teacher_R, self.first_R, self.depth_R)
        return [
            SupervisedRows(*chunk) for chunk in zip(*(column.split(size) for column in columns), strict=True)
        ]


@dataclass(frozen=True)
class NeededRows:
    """The rows that some loss reads, at a step or through a later one; of all others, step 0's keys and values do.

    Rows stay needed up to their last labelled step. They are in the order of that step, the last first, so that the
    rows of a step are the first of those of the step before.
    """

    row_N: Tensor
    """int64 [N]: indices into the flat batch."""
    counts: Sequence[int]
    """Rows of each step: at least one where the batch has any, for every parameter to get a gradient."""
    place_T: Tensor
    """int64 [T]: the place of the batch's row among ``row_N``; any of them where it has none."""

    @classmethod
    def of(cls, batch: DraftBatch, num_steps: int) -> NeededRows:
        """Return a batch's needed rows, worked out on the CPU: no device is waited for."""
        device, (teacher_R, first_R, depth_R) = batch.input_ids_T.device, _labelled(batch)
        steps_T = torch.zeros(len(batch.input_ids_T), dtype=torch.int64)
        for step in range(num_steps):
            labelled_R = (first_R <= step) & (step < depth_R)
            steps_T[teacher_R[labelled_R] - 1 - step] = step + 1
        order_T = steps_T.argsort(descending=True, stable=True)
        least, multiple = min(1, len(order_T)), batch.rows_multiple
        needed = [max(least, int((steps_T > step).sum())) for step in range(num_steps)]
        counts = [count + -count % multiple for count in needed]
        row_N = order_T[: counts[0]]
        place_T = torch.zeros_like(steps_T)
        place_T[row_N] = torch.arange(len(row_N))
        return cls(to_device_async(row_N, device), counts, to_device_async(place_T, device))

    def of_step(self, step: int) -> Tensor:
        """Return the rows of a step, int64."""
        return self.row_N[: self.counts[step]]


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


def _labelled(batch: DraftBatch) -> Tensor:
    """Return int64 [3, R], on the CPU: the columns of ``SupervisedRows``."""
    mask_T, place_T = batch.loss_mask_T.cpu(), batch.guess_place_T
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
    return torch.cat(columns, dim=1)
