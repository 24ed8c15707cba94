"""Compute head, teacher and loss of all unrolled steps for a few positions at a time.

The teacher of row t in step s is the target's distribution at position u = t + 1 + s. So the loop runs over
positions u, computes the target's logits once, and scores all S rows that share them. The same pass computes
loss, metrics, and the gradients with respect to the head and its inputs. No tensor with the logits of all T
positions is ever allocated.

Shapes: R positions of a chunk, S steps, V rows of the draft's head (of this shard: see ``spec_core.ops``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core.records import StepOutput
from spec_kit.drafting import ROW_LOSSES, score, teach, with_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core import LinearWeight, VocabularyOps
    from spec_kit.chain_drafting.kernels import ChainKernels
    from spec_kit.chain_drafting.labels import NeededRows, SupervisedRows
    from spec_kit.drafting import DistilledLoss


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
        weight_S: Tensor,
        needed: NeededRows | None = None,
    ) -> StepOutput:
        """Return loss and metrics of all steps.

        ``states``: inputs of the head in each of S steps, for the ``needed`` rows, or for all rows [T, H] without it.
        ``hidden_TH``: inputs of the target's final norm. ``weight_S``: factor of step s on the loss of a labelled
        row.
        """
        totals = _StepSums(self, states, weight_S, None if needed is None else needed.index_T)
        with torch.no_grad():
            for chunk in rows.chunks(self._chunk_rows(len(states))):
                totals.add(chunk, hidden_TH[chunk.teacher_R])
        return totals.output()

    def _chunk_rows(self, num_steps: int) -> int:
        """Return the number of positions per chunk, by the memory of the teacher's and the draft's logits."""
        row_bytes = 4 * self.ops.shard_rows + self.head.weight.element_size() * num_steps * len(
            self.head.weight
        )
        return max(1, self.ops.chunk_bytes // row_bytes)


class _StepSums:
    """Sums of one forward pass over all chunks: loss, metrics, and, if gradients are enabled, gradients."""

    def __init__(
        self, head: HeadLoss, states: Sequence[Tensor], weight_S: Tensor, index_T: Tensor | None
    ) -> None:
        self.head, self.states, self.weight_S, self.index_T = head, states, weight_S, index_T
        num_steps, (num_tokens, width) = len(states), states[0].shape
        zeros = weight_S.new_zeros
        self.loss = zeros(())
        self.sums = {name: zeros(num_steps) for name in ("accuracy", "acceptance", "step_loss")}
        self.labelled_S = torch.zeros(num_steps, dtype=torch.int64, device=weight_S.device)
        self.agreed_X = zeros(num_steps * num_tokens)
        self.grad_states_XH = self.grad_head_VH = None
        if torch.is_grad_enabled():
            # One extra row takes the gradients of rows without a label.
            self.grad_states_XH = states[0].new_zeros(num_steps * num_tokens + 1, width)
            if head.head.weight.requires_grad:
                self.grad_head_VH = zeros(head.head.weight.shape)

    def add(self, chunk: SupervisedRows, hidden_RH: Tensor) -> None:
        """Add the losses, metrics and gradients of the S rows of every position of a chunk."""
        head, step_S = self.head, torch.arange(len(self.states), device=self.weight_S.device)
        labelled_RS, row_RS = chunk.labels(step_S)
        if self.index_T is not None:
            row_RS = self.index_T[row_RS]
        row_RS = torch.where(labelled_RS, row_RS, 0)  # a row without a label gets index 0 and weight 0
        input_RSH = torch.stack([state[row_RS[:, s]] for s, state in enumerate(self.states)], dim=1)
        logits_RSV = head.head.forward(input_RSH)
        ops, kernels = head.ops, head.kernels
        teacher = teach(ops, kernels, hidden_RH, head.ids_V, head.vocab_mask_V)
        scored = score(logits_RSV, head.ids_V, teacher, ops, kernels)
        agreed_RS = labelled_RS & (scored.best_RS == teacher.best_R[:, None])
        value_RS, factors = ROW_LOSSES[head.kind](scored, teacher, ops, kernels)
        trained_RS = (labelled_RS & teacher.trained_R[:, None]).to(self.weight_S.dtype)
        weight_RS = trained_RS * self.weight_S
        self.loss += (value_RS * weight_RS).sum()
        self.sums["step_loss"] += (value_RS * trained_RS).sum(0)
        self.sums["acceptance"] += (scored.overlap_RS * labelled_RS).sum(0)
        self.sums["accuracy"] += agreed_RS.sum(0)
        self.labelled_S += labelled_RS.sum(0)
        row_X = (row_RS + step_S * len(self.states[0])).flatten()
        self.agreed_X.index_add_(0, row_X, agreed_RS.flatten().to(self.agreed_X.dtype))
        if self.grad_states_XH is None:
            return
        a, b, c = (factor * weight_RS for factor in factors)
        grad_RSV = kernels.distill_grad_(
            logits_RSV, scored.log_sum_RS, (a, b, c), teacher.distribution, teacher.in_vocab_mass_R
        )
        self._add_gradients(
            grad_RSV, input_RSH, torch.where(labelled_RS.flatten(), row_X, len(self.agreed_X))
        )

    def _add_gradients(self, grad_RSV: Tensor, input_RSH: Tensor, row_X: Tensor) -> None:
        """Store a chunk's gradients of the states, and add its gradient of the head.

        ``row_X``: index in ``grad_states_XH`` for each position and step; pairs without a label share the
        last index. Each labelled row occurs once in a step, so gradients of states need no sum.
        """
        if self.grad_states_XH is None:
            return
        grad_XV = grad_RSV.flatten(0, 1)
        grad_XH = self.head.ops.reduce_sum(self.head.head.backward(grad_XV))
        self.grad_states_XH.index_copy_(0, row_X, grad_XH)
        if self.grad_head_VH is not None:
            self.grad_head_VH += grad_XV.T @ input_RSH.flatten(0, 1)

    def output(self) -> StepOutput:
        """Return the loss, and the sum and count of each metric.

        The acceptance length of a row is 1 + the number of consecutive steps, from step 0 on, in which draft and
        target have the same arg-max.
        """
        first_rows = self.labelled_S[0]
        chains_ST = self.agreed_X.view(len(self.states), -1).cumprod(0)
        loss = self.loss
        if self.grad_states_XH is not None:
            grad_STH = self.grad_states_XH[:-1].view(len(self.states), *self.states[0].shape)
            inputs = list(self.states)
            grads = [grad_TH[: len(state)] for grad_TH, state in zip(grad_STH, inputs, strict=True)]
            if self.grad_head_VH is not None:
                grads.append(self.grad_head_VH)
                inputs.append(self.head.head.weight)
            loss = with_gradients(loss, grads, inputs)
        return StepOutput(
            loss=loss,
            sums={**self.sums, "acceptance_length": first_rows + chains_ST.sum()},
            counts={**dict.fromkeys(self.sums, self.labelled_S), "acceptance_length": first_rows},
        )
