"""Compute head, teacher and loss of all unrolled steps for a few positions at a time.

The teacher of row t in step s is the target's distribution at position u = t + 1 + s. So the loop runs over
positions u, computes the target's logits once, and scores all S rows that share them. The same pass computes
loss, metrics, and the gradients with respect to the head and its inputs. No tensor with the logits of all T
positions is ever allocated.

Shapes: R positions of a chunk, S steps, V rows of the draft's head (of this shard: see ``spec_core.ops``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from spec_core import LinearWeight, VocabularyOps
from spec_core.records import StepOutput
from spec_kit.chain_drafting.kernels import ChainKernels
from spec_kit.chain_drafting.labels import NeededRows, SupervisedRows
from spec_kit.drafting import DistilledLoss
from spec_kit.layers import ROW_LOSSES, Teacher, reverse_kl, score, teach, with_gradients, with_rounds


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """The draft's head, and what its loss needs: the vocabulary, the kind of loss, operations and kernels."""

    head: LinearWeight
    """Weight of the head: a parameter of the draft, or the target's head, which gets no gradient."""
    ids_V: Tensor
    """int64: target id of each row of the head."""
    vocab_mask_V: Tensor | None
    """bool over the whole target vocabulary: whether the token has a row in the head; None if all have one."""
    kind: DistilledLoss
    ops: VocabularyOps
    kernels: ChainKernels

    def __call__(
        self,
        states: Sequence[Tensor],
        hidden_TH: Tensor,
        rows: SupervisedRows,
        weight_WS: Tensor,
        needed: NeededRows | None = None,
    ) -> StepOutput:
        """Return loss and metrics of all steps.

        ``states``: inputs of the head in each of S steps, for the ``needed`` rows, or for all rows [T, H] without it.
        ``hidden_TH``: inputs of the target's final norm. ``weight_WS``: factor of step s on the loss of a labelled
        row, [1, S] (``step_weights``). With two rows (``judged_weights``), the loss of a refused guess is KL(q ‖ p),
        and its factor is in the second row.
        """
        totals = _StepSums(self, states, weight_WS)
        pairs = _Pairs.of(rows, states, None if needed is None else needed.index_T)
        with torch.no_grad():
            for chunk in pairs.chunks(self._chunk_rows(len(states))):
                totals.add(chunk, hidden_TH.index_select(0, chunk.teacher_R))
        return totals.output(pairs, counts_rounds=rows.evaluates)

    def _chunk_rows(self, num_steps: int) -> int:
        """Return the number of positions per chunk, by the memory of the teacher's and the draft's logits."""
        row_bytes = 4 * self.ops.shard_rows + self.head.weight.element_size() * num_steps * len(
            self.head.weight
        )
        return max(1, self.ops.chunk_bytes // row_bytes)


@dataclass(frozen=True)
class _Pairs:
    """The (position, step) pairs of R positions."""

    teacher_R: Tensor
    """int64: position of the teacher in the flat batch."""
    token_R: Tensor
    """int64: the token of the data after that position."""
    refused_R: Tensor
    """int64: ``SupervisedRows.refused_R``."""
    labelled_RS: Tensor
    """bool: whether the pair has a label."""
    row_SR: Tensor
    """int64: index of the pair's row among the states of its step; 0 for a pair without a label."""
    flat_RS: Tensor
    """int64: index of the pair's row among the rows of all steps, as many in each step as in the first. Pairs without
    a label share the index after the last row."""

    @classmethod
    def of(cls, rows: SupervisedRows, states: Sequence[Tensor], index_T: Tensor | None) -> _Pairs:
        """Return the pairs of ``rows``. ``index_T``: index of each row of the batch among the states."""
        num_steps = len(states)
        num_rows = len(states[0])
        step_S = torch.arange(num_steps, device=rows.teacher_R.device)
        labelled_RS, row_RS = rows.labels(step_S)
        if index_T is not None:
            row_RS = index_T[row_RS]
        flat_RS = torch.where(labelled_RS, row_RS + step_S * num_rows, num_steps * num_rows)
        row_SR = (row_RS * labelled_RS).T.contiguous()
        return cls(rows.teacher_R, rows.token_R, rows.refused_R, labelled_RS, row_SR, flat_RS)

    def refused(self) -> Tensor:
        """Return which pairs are refused guesses, bool [R, S]: at most one pair of each position."""
        return self.refused_R[:, None] == torch.arange(
            self.labelled_RS.shape[1], device=self.refused_R.device
        )

    def chunks(self, most: int) -> Iterator[_Pairs]:
        """Yield as few chunks as possible, of at most ``most`` positions, and all of about equally many."""
        total = len(self.teacher_R)
        size = ceil(total / ceil(total / most)) if total else 1
        for first in range(0, total, size):
            part = slice(first, first + size)
            yield _Pairs(
                self.teacher_R[part],
                self.token_R[part],
                self.refused_R[part],
                self.labelled_RS[part],
                self.row_SR[:, part],
                self.flat_RS[part],
            )


class _Found(NamedTuple):
    """Values of the pairs of a chunk, [R, S]."""

    value_RS: Tensor
    """The loss."""
    overlap_RS: Tensor
    """The probability that a guess drawn from the draft's distribution is accepted."""
    chance_RS: Tensor
    """The target's probability of the draft's arg-max."""
    agreed_RS: Tensor
    """Whether draft and target have the same arg-max."""
    matched_RS: Tensor
    """Whether the draft's arg-max is the token of the data."""
    trained_R1: Tensor
    """Whether the position is trained."""


class _ReverseKl:
    """KL(q ‖ p) of a chunk's refused guesses, in place of their loss."""

    def __init__(
        self, chunk: _Pairs, logits_RSV: Tensor, log_sum_RS: Tensor, teacher: Teacher, ops: VocabularyOps
    ) -> None:
        self.refused_RS = chunk.refused()
        row_R = torch.arange(len(chunk.refused_R), device=chunk.refused_R.device)
        self._pair_R = row_R, chunk.refused_R.clamp(min=0, max=logits_RSV.shape[1] - 1)
        self.value_R, self._grad_RV = reverse_kl(
            logits_RSV[self._pair_R], log_sum_RS[self._pair_R], teacher.distribution, ops.reduce_sum
        )

    def replace_gradients_(self, grad_RSV: Tensor, weight_RS: Tensor) -> None:
        """Write the gradients by the logits, times the weights, in place of those of the refused guesses."""
        grad_RV = (self._grad_RV * weight_RS[self._pair_R][:, None]).to(grad_RSV.dtype)
        is_refused_R1 = self.refused_RS[self._pair_R][:, None]
        grad_RSV[self._pair_R] = torch.where(is_refused_R1, grad_RV, grad_RSV[self._pair_R])


class _StepSums:
    """Values of one forward pass over all chunks: losses, metrics, and, if gradients are enabled, gradients.

    Chunks only add their values to lists, which are summed at the end. Sums of each chunk would be many small
    operations.
    """

    def __init__(self, head: HeadLoss, states: Sequence[Tensor], weight_WS: Tensor) -> None:
        self.head = head
        self.states = states
        self.weight_WS = weight_WS
        self.are_judged = len(weight_WS) > 1
        self.found: list[_Found] = []
        self.grad_states_XH = self.grad_head_VH = None
        if torch.is_grad_enabled():
            num_steps = len(states)
            num_rows, width = states[0].shape
            # One extra row takes the gradients of pairs without a label.
            self.grad_states_XH = states[0].new_zeros(num_steps * num_rows + 1, width)
            if head.head.weight.requires_grad:
                self.grad_head_VH = weight_WS.new_zeros(head.head.weight.shape)

    def add(self, chunk: _Pairs, hidden_RH: Tensor) -> None:
        """Add the losses, metrics and gradients of the S rows of every position of a chunk."""
        head = self.head
        columns = zip(self.states, chunk.row_SR, strict=True)
        input_RSH = torch.stack([state.index_select(0, row_R) for state, row_R in columns], dim=1)
        logits_RSV = head.head.forward(input_RSH)
        ops, kernels = head.ops, head.kernels
        teacher = teach(ops, kernels, hidden_RH, head.ids_V, head.vocab_mask_V)
        scored = score(logits_RSV, head.ids_V, teacher, ops, kernels)
        value_RS, factors = ROW_LOSSES[head.kind](scored, teacher, ops, kernels)
        weight_RS = self.weight_WS[:1]
        reverse = None
        if self.are_judged:
            reverse = _ReverseKl(chunk, logits_RSV, scored.log_sum_RS, teacher, ops)
            value_RS = torch.where(reverse.refused_RS, reverse.value_R[:, None], value_RS)
            weight_RS = torch.where(reverse.refused_RS, self.weight_WS[1], self.weight_WS[0])
        found = _Found(
            value_RS=value_RS,
            overlap_RS=scored.overlap_RS,
            chance_RS=scored.chance_RS,
            agreed_RS=scored.best_RS == teacher.best_R[:, None],
            matched_RS=scored.best_RS == chunk.token_R[:, None],
            trained_R1=teacher.trained_R[:, None],
        )
        self.found.append(found)
        if self.grad_states_XH is None:
            return
        weight_RS = (chunk.labelled_RS & teacher.trained_R[:, None]) * weight_RS
        a, b, c = (factor * weight_RS for factor in factors)
        grad_RSV = kernels.distill_grad_(
            logits_RSV, scored.log_sum_RS, (a, b, c), teacher.distribution, teacher.in_vocab_mass_R
        )
        if reverse is not None:
            reverse.replace_gradients_(grad_RSV, weight_RS)
        self._add_gradients(grad_RSV, input_RSH, chunk)

    def _add_gradients(self, grad_RSV: Tensor, input_RSH: Tensor, chunk: _Pairs) -> None:
        """Store a chunk's gradients of the states, and add its gradient of the head.

        Pairs without a label share the last row of ``grad_states_XH``. Each labelled row occurs once in a step, so
        gradients of states need no sum.
        """
        if self.grad_states_XH is None:
            return
        grad_XV = grad_RSV.flatten(0, 1)
        grad_XH = self.head.ops.reduce_sum(self.head.head.backward(grad_XV))
        self.grad_states_XH.index_copy_(0, chunk.flat_RS.flatten(), grad_XH)
        if self.grad_head_VH is not None:
            self.grad_head_VH += grad_XV.T @ input_RSH.flatten(0, 1)

    def output(self, pairs: _Pairs, *, counts_rounds: bool) -> StepOutput:
        """Return the loss, and the sum and count of each metric; with those of an engine's rounds, if asked.

        The acceptance length of a row is 1 + the number of guesses that are accepted before the first that is not,
        from step 0 on. The target at temperature 0 accepts its own arg-max. At temperature 1, it accepts a guess with
        its probability for it, and the row continues with the guess only if the data do.
        """
        wide = self.weight_WS.dtype
        labelled_RS = pairs.labelled_RS
        none_0S = labelled_RS[:0]
        parts = self.found or [_Found(none_0S.to(wide), none_0S, none_0S, none_0S, none_0S, none_0S[:, :1])]
        found = _Found(*map(torch.cat, zip(*parts, strict=True)))
        lost_RS = found.value_RS * (labelled_RS & found.trained_R1)
        step_loss_S = lost_RS.sum(0)
        labelled_S = labelled_RS.sum(0)
        values = (found.agreed_RS, found.matched_RS, found.chance_RS)
        kept_MRS = torch.stack([(value_RS * labelled_RS).to(wide) for value_RS in values])
        table_MX = self.weight_WS.new_zeros(len(values), len(self.states) * len(self.states[0]) + 1)
        table_MX.index_copy_(1, pairs.flat_RS.flatten(), kept_MRS.flatten(1))
        agreed_ST, matched_ST, chance_ST = table_MX[:, :-1].unflatten(1, (len(self.states), -1))
        reached_ST = matched_ST.cumprod(0)
        accepted_t1 = chance_ST[0].sum() + (reached_ST[:-1] * chance_ST[1:]).sum()
        accuracy_S, _, acceptance_t1_S = kept_MRS.sum(1)
        lengths = {
            "acceptance_length": labelled_S[0] + agreed_ST.cumprod(0).sum(),
            "acceptance_length_t1": labelled_S[0] + accepted_t1,
            "acceptance_length_data": labelled_S[0] + reached_ST.sum(),
        }
        sums = {
            "accuracy": accuracy_S,
            "acceptance": (found.overlap_RS * labelled_RS).sum(0),
            "acceptance_t1": acceptance_t1_S,
            "step_loss": step_loss_S,
        }
        counts = dict.fromkeys(sums, labelled_S) | dict.fromkeys(lengths, labelled_S[0])
        loss_WS = step_loss_S[None]
        if self.are_judged:
            refused_RS = pairs.refused()
            loss_WS = torch.stack([(lost_RS * ~refused_RS).sum(0), (lost_RS * refused_RS).sum(0)])
        loss = (loss_WS * self.weight_WS).sum()
        output = StepOutput(loss=self._with_gradients(loss), sums=sums | lengths, counts=counts)
        if not counts_rounds:
            return output
        return with_rounds(output, pairs.teacher_R, reached_ST.T[pairs.row_SR[0]], after_prompts=True)

    def _with_gradients(self, loss: Tensor) -> Tensor:
        """Return the loss with its gradients, if they are enabled."""
        if self.grad_states_XH is None:
            return loss
        grad_STH = self.grad_states_XH[:-1].view(len(self.states), *self.states[0].shape)
        inputs = list(self.states)
        grads = [grad_TH[: len(state)] for grad_TH, state in zip(grad_STH, inputs, strict=True)]
        if self.grad_head_VH is not None:
            grads.append(self.grad_head_VH)
            inputs.append(self.head.head.weight)
        return with_gradients(loss, grads, inputs)
