"""Find the labels of a chain's unrolled steps, their counts and weights, and the rows to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core import to_device_async
from spec_core.records import DraftBatch, Supervision
from spec_kit.layers import ContextRows, are_refused

WORTH_LEAVING_OUT = 0.03
"""Rows are left out if they are more than this share of all steps' rows: copying the remaining rows costs 3 to
6 % of a step."""


@dataclass(frozen=True)
class SupervisedRows:
    """The labelled (row, step) pairs, grouped by the position u of their teacher.

    The teacher is the target's distribution at u. Token u + 1 is the label; the row of step s is u − 1 − s.
    """

    teacher_R: Tensor
    """int64 [R]: position u as an index into the flat batch."""
    first_R: Tensor
    depth_R: Tensor
    """int64 [R]: steps ``first`` ≤ s < ``depth`` are labelled. Row u − 1 − s lies in the document iff s < u, where u
    counts within the document."""
    refused_R: Tensor
    """int64 [R]: the step of an engine's guess that this token replaced (``count_judged``); −1 if there is none."""
    token_R: Tensor
    """int64 [R]: the label, token u + 1."""
    is_local_T: Tensor | None = None
    """bool [T]: whether this rank computes the row; None if it computes all rows."""
    evaluates: bool = False
    """Whether the batch is evaluated, and this rank computes all rows."""

    @classmethod
    def of(cls, batch: DraftBatch, needed: NeededRows | None = None) -> SupervisedRows:
        """Return the labelled pairs of a batch; compute them on the CPU, without waiting for a device.

        If the batch records at which depth the engine guessed each token (``guess_depth_T``), a token of depth k is
        the label of step k − 1 only. ``needed``: if it is given, pairs without a row of this rank are left out.
        """
        columns = _labelled(batch)
        device = batch.input_ids_T.device
        is_local_T = None if needed is None else needed.rows.is_local_T
        if needed is None or is_local_T is None:
            teacher_R, first_R, depth_R, refused_R = to_device_async(columns, device)
            token_R = batch.input_ids_T[teacher_R + 1]
            return cls(teacher_R, first_R, depth_R, refused_R, token_R, evaluates=batch.evaluates)
        teacher_R, first_R, depth_R, _ = columns
        below_T = F.pad(is_local_T.cumsum(0), (1, 0))  # number of this rank's rows before each row
        deepest_R = depth_R.clamp(max=len(needed.counts))
        columns = columns[
            :, below_T[(teacher_R - first_R).maximum(teacher_R - deepest_R)] > below_T[teacher_R - deepest_R]
        ]
        teacher_R, first_R, depth_R, refused_R = to_device_async(columns, device)
        token_R = batch.input_ids_T[teacher_R + 1]
        return cls(teacher_R, first_R, depth_R, refused_R, token_R, to_device_async(is_local_T, device))

    def labels(self, step_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each step has a label on this rank, bool [R, S], and the step's row, int64 [R, S].

        The row of a step without a label has no meaning.
        """
        labelled_RS = (step_S >= self.first_R[:, None]) & (step_S < self.depth_R[:, None])
        row_RS = (self.teacher_R[:, None] - 1 - step_S).clamp(min=0)
        if self.is_local_T is not None:
            labelled_RS = labelled_RS & self.is_local_T[row_RS]
        return labelled_RS, row_RS


@dataclass(frozen=True)
class NeededRows:
    """The rows that must be computed in each step, because they have a label in it or in a later step.

    The other rows only contribute keys and values of step 0. Rows are sorted by their last labelled step,
    latest first, so that the rows of a step are the first rows of the step before. If few rows could be left
    out, every step computes all rows in the batch's order, and no row is copied.
    """

    row_N: Tensor
    """int64 [N]: indices into the flat batch."""
    counts: Sequence[int]
    """Number of rows of each step; at least 1 if the batch has any row, so every parameter gets a gradient."""
    index_T: Tensor
    """int64 [T]: index in ``row_N`` of each row of the batch; 0 for a row that is not needed."""
    rows: ContextRows
    """The rows that this rank computes in step 0; they include the needed rows."""
    local_N: Tensor
    """int64 [N]: index of each needed row among the rows of this rank."""
    are_all: bool = False
    """Whether every step computes all rows of the batch, in the batch's order."""

    @classmethod
    def of(cls, batch: DraftBatch, num_steps: int, rows: ContextRows | None = None) -> NeededRows:
        """Return the rows of a batch that each of ``num_steps`` steps needs, among this rank's ``rows``.

        ``rows`` None means all rows. The result is computed on the CPU, without waiting for a device.
        """
        rows = rows or ContextRows(len(batch.input_ids_T), batch.input_ids_T.device)
        device = batch.input_ids_T.device
        teacher_R, first_R, depth_R, _ = _labelled(batch)
        step_S = torch.arange(num_steps)
        labelled_RS = (first_R[:, None] <= step_S) & (step_S < depth_R[:, None])
        row_RS = (teacher_R[:, None] - 1 - step_S).clamp_(min=0)
        steps_T = torch.zeros(len(batch.input_ids_T), dtype=torch.int64)
        steps_T.scatter_reduce_(0, row_RS.flatten(), ((step_S + 1) * labelled_RS).flatten(), "amax")
        steps_P = steps_T[rows.row_P]
        order_P = steps_P.argsort(descending=True, stable=True)
        least = min(1, len(order_P))
        needed = (steps_P[:, None] > step_S).sum(0).clamp(min=least).tolist()
        counts = [count + -count % batch.rows_multiple for count in needed]
        most = num_steps * len(order_P)
        are_all = rows.group is None and most - sum(counts) <= WORTH_LEAVING_OUT * most
        if are_all:
            order_P = torch.arange(len(order_P))
            counts = [len(order_P)] * num_steps
        local_N = order_P[: counts[0]]
        row_N = rows.row_P[local_N]
        index_T = torch.zeros_like(steps_T)
        index_T[row_N] = torch.arange(len(row_N))
        row_N, local_N = to_device_async(torch.stack([row_N, local_N]), device)
        index_T = to_device_async(index_T, device)
        return cls(row_N, counts, index_T, rows, local_N, are_all)

    def take(self, value_TX: Tensor) -> Tensor:
        """Return the values of the rows that step 0 computes, [N, …]; later steps compute the first of them."""
        return value_TX if self.are_all else value_TX.index_select(0, self.row_N)

    def of_step(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Return int64 indices of a step's rows, in the flat batch and among this rank's rows.

        Both are None if every step computes all rows.
        """
        if self.are_all:
            return None, None
        return self.row_N[: self.counts[step]], self.local_N[: self.counts[step]]


def count_labels(supervision: Sequence[Supervision], num_steps: int) -> Tensor:
    """Return how many supervised tokens have at least s + 2 tokens before them, per step s; float64 [S].

    Only tokens of the same document count as tokens before. If a sample records at which depth the engine guessed
    each token (``guess_depth``), only tokens of depth s + 1 count.
    """

    def labels(sample: Supervision, step: int) -> Tensor:
        labelled_T = sample.loss_mask[step + 2 :]
        if sample.guess_depth is not None:
            labelled_T = labelled_T & (sample.guess_depth[step + 2 :] == step + 1)
        return labelled_T.sum()

    counts = [torch.stack([labels(sample, s) for s in range(num_steps)]) for sample in supervision]
    return sum(counts, torch.zeros(num_steps, dtype=torch.int64)).cpu().double()


def count_judged(supervision: Sequence[Supervision], num_steps: int) -> Tensor:
    """Return ``count_labels`` of the guesses that the target accepted, then of the refused ones; float64 [2 S].

    A guess was refused if a round begins behind its token: the next token has depth 1. The last token of an answer,
    and all tokens of a sample without guess depths, count as accepted.
    """

    def judged(sample: Supervision, *, refused: bool) -> Supervision:
        depth_T = torch.zeros_like(sample.loss_mask) if sample.guess_depth is None else sample.guess_depth
        return replace(sample, loss_mask=sample.loss_mask & (are_refused(depth_T) == refused))

    samples = ([judged(sample, refused=refused) for sample in supervision] for refused in (False, True))
    return torch.cat([count_labels(each, num_steps) for each in samples])


def step_weights(denominators: Tensor, decay: float, like: Tensor) -> Tensor:
    """Return each step's weight, [1, S]: ``decay`` ** s / ``denominators[s]``, or 0 if the denominator is 0.

    It is on the device of ``like``, in float32 or, if wider, the dtype of ``like``.
    """
    count = denominators.to(like.device)
    factor = decay ** torch.arange(len(count), device=like.device, dtype=count.dtype)
    weight = torch.where(count > 0, factor / count.clamp(min=1), 0)
    return weight[None].to(torch.promote_types(like.dtype, torch.float32))


def judged_weights(denominators: Tensor, decay: float, like: Tensor) -> Tensor:
    """Return each step's weight of an accepted and of a refused guess, [2, S], for the counts of ``count_judged``.

    The weights of all accepted guesses are equal, those of refused ones proportional to ``decay`` ** s. The weights
    of either sum to 1/2 in the global batch. Device and dtype are as in ``step_weights``.
    """
    count_2S = denominators.to(like.device).view(2, -1)
    step_S = torch.arange(count_2S.shape[1], device=like.device, dtype=count_2S.dtype)
    factor_2S = torch.stack([torch.ones_like(step_S), decay**step_S])
    total_21 = (count_2S * factor_2S).sum(1, keepdim=True)
    weight_2S = torch.where(total_21 > 0, factor_2S / (2 * total_21), 0)
    return weight_2S.to(torch.promote_types(like.dtype, torch.float32))


def _labelled(batch: DraftBatch) -> Tensor:
    """Return teacher_R, first_R, depth_R and refused_R of ``SupervisedRows``, int64 [4, R], on the CPU."""
    position_T, guess_depth_T = batch.host_position_T, batch.guess_depth_T
    label_R = (batch.loss_mask_T & (position_T > 1)).nonzero().squeeze(1)
    depth_R = position_T[label_R] - 1
    first_R = torch.zeros_like(depth_R)
    refused_R = torch.full_like(depth_R, -1)
    if guess_depth_T is not None:
        guess_depth_R = guess_depth_T[label_R]
        guessed_R = (guess_depth_R > 0) & (guess_depth_R <= depth_R)
        label_R, depth_R = label_R[guessed_R], guess_depth_R[guessed_R]
        first_R = depth_R - 1
        refused_R = torch.where(are_refused(guess_depth_T)[label_R], first_R, -1)
    return torch.stack([label_R - 1, first_R, depth_R, refused_R])
