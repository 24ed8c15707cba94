"""Compute loss, metrics and gradients of the guesses that count in the loss, some blocks at a time.

The wanted distribution of a guess is t = ce_weight · [the data's token] + soft_weight · p; p is the target's
distribution. The loss of a guess, before its weight, is −Σ t log q + selector_weight · (−Σ t log s). The
first sum is over the vocabulary, and q is the distribution of the target's head. The second sum is over the
candidates alone, and s is the distribution from which the draft guesses. A token that is no candidate trains
the head only, because the selector never chooses it. Loss, metrics and gradients come from one pass, so only
one chunk's logits are in memory.

Shapes: A blocks, S guesses of a block, R guesses of a chunk that count in the loss, C candidates, r rank, V
rows of the head on this shard (see ``spec_core.ops``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spec_core import VocabularyOps
from spec_core.records import DraftBatch, StepOutput
from spec_draft_dflash2.config import DFlash2Config
from spec_draft_dflash2.selector import Candidates, LocalColumns, scores, sum_rows
from spec_draft_dflash2.shape import DFlash2Shape
from spec_kit.block_drafting import (
    BlockHead,
    BlockKernels,
    CountedGuesses,
    GuessMetrics,
    loss_scale,
    teacher_of_guesses,
)
from spec_kit.layers import Distribution, sharded_logsumexp_argmax, with_gradients

_VALUES = ("accuracy", "acceptance_t1", "head_accuracy", "recall", "head_loss", "selector_loss")
_LENGTHS = {
    "acceptance_length": ("accuracy", "accuracy"),
    "acceptance_length_t1": ("accuracy", "acceptance_t1"),
}


@dataclass(frozen=True)
class SelectorInputs:
    """The tensors for which the loss computes gradients."""

    states_ASH: Tensor
    """Inputs of the target's head."""
    context_ASr: Tensor
    """The selector's vector for each guess, computed from the slot's state and the previous token. Its
    product with a candidate's row of ``successor_Vr`` is added to the candidate's logit."""
    successor_Vr: Tensor
    """The selector's table with a row for each token as a candidate; every vocabulary shard has all rows."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors: states, contexts and table."""
        return self.states_ASH, self.context_ASr, self.successor_Vr


@dataclass(frozen=True, kw_only=True)
class SelectorLoss:
    """Computes the loss of guesses, which has several terms, and weighs each guess."""

    ops: VocabularyOps
    head: BlockHead
    kernels: BlockKernels
    options: DFlash2Config
    shape: DFlash2Shape
    weight_S: Tensor

    def __call__(
        self, inputs: SelectorInputs, batch: DraftBatch, guesses: CountedGuesses, denominators: Tensor
    ) -> StepOutput:
        """Return loss and metrics of the blocks, divided by the global batch's ``denominators``."""
        metrics = GuessMetrics(guesses, len(self.weight_S), _VALUES, _LENGTHS)
        totals = _Sums(self, inputs, batch, loss_scale(denominators, inputs.states_ASH), metrics)
        with torch.no_grad():
            for chunk in guesses.chunks(self.ops, self.head, len(self.weight_S)):
                totals.add(chunk)
        return totals.output()


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """The guesses of a chunk, compared with labels and teacher. Values are sums over vocabulary shards."""

    head: Distribution
    teacher: Distribution
    label_R: Tensor
    best_R: Tensor
    """int64: the token with the head's largest logit."""
    head_loss_R: Tensor
    candidate_RC: Tensor
    score_RC: Tensor
    prob_RC: Tensor
    """The target's probability of each candidate."""
    wanted_RC: Tensor
    """The wanted distribution t at each candidate."""

    @property
    def guess_R(self) -> Tensor:
        """int64 [R]: the candidate to which the selector gives the largest score."""
        return self.candidate_RC.gather(1, self._choice_R1).squeeze(1)

    @property
    def chance_R(self) -> Tensor:
        """The target's probability of the guess, [R]."""
        return self.prob_RC.gather(1, self._choice_R1).squeeze(1)

    @cached_property
    def _choice_R1(self) -> Tensor:
        return self.score_RC.argmax(1, keepdim=True)

    @property
    def is_label_RC(self) -> Tensor:
        """Whether a candidate is the data's token, bool [R, C]."""
        return self.candidate_RC == self.label_R[:, None]

    @property
    def selector_loss_R(self) -> Tensor:
        """The selector's loss −Σ t log s over the candidates, [R]."""
        return -(self.wanted_RC * self.score_RC.log_softmax(1)).sum(1)

    @property
    def selector_grad_RC(self) -> Tensor:
        """Derivatives of ``selector_loss_R`` with respect to the scores."""
        return self.wanted_RC.sum(1, keepdim=True) * self.score_RC.softmax(1) - self.wanted_RC


class _Sums:
    """Sums of one forward pass over all chunks: loss, metrics, and gradients if they are enabled."""

    def __init__(
        self,
        rule: SelectorLoss,
        inputs: SelectorInputs,
        batch: DraftBatch,
        scale: Tensor,
        metrics: GuessMetrics,
    ) -> None:
        self.rule, self.inputs, self.batch, self.scale, self.metrics = rule, inputs, batch, scale, metrics
        self.grads: tuple[Tensor, Tensor] | None = None
        self.chosen: list[tuple[Tensor, Tensor, Tensor]] = []
        """Candidates [R, C], derivatives with respect to their scores [R, C], and contexts [R, r] of each chunk."""
        if torch.is_grad_enabled():
            self.grads = torch.zeros_like(inputs.states_ASH), torch.zeros_like(inputs.context_ASr)

    def add(self, guesses: CountedGuesses) -> None:
        """Add the loss, metrics and gradients of one chunk: the guesses of some blocks."""
        options, place_R = self.rule.options, guesses.place_R
        scored = self._score(guesses)
        loss_R = scored.head_loss_R + options.selector_weight * scored.selector_loss_R
        weight_R = self.rule.weight_S.to(loss_R)[guesses.guess_R] * self.scale
        correct_R = scored.guess_R == scored.label_R
        self.metrics.add(
            weight_R * loss_R,
            accuracy=correct_R,
            acceptance_t1=scored.chance_R,
            head_accuracy=scored.best_R == scored.label_R,
            recall=scored.is_label_RC.any(1),
            head_loss=scored.head_loss_R,
            selector_loss=scored.selector_loss_R,
        )
        if self.grads is not None:
            self._add_gradients(place_R, scored, weight_R)

    def _score(self, guesses: CountedGuesses) -> _Scored:
        place_R, rule = guesses.place_R, self.rule
        ops, kernels = rule.ops, rule.kernels
        logits_RV = rule.head.products.forward(self.inputs.states_ASH[place_R])
        log_sum_R, best_R = sharded_logsumexp_argmax(logits_RV, rule.head.ids_V, ops, kernels)
        head = logits_RV, log_sum_R
        teacher = teacher_of_guesses(guesses, self.batch, rule.head, ops, kernels).distribution
        found = Candidates.of(logits_RV, ops, self.rule.shape)
        label_R = self.batch.input_ids_T[guesses.label_R]
        columns = LocalColumns.of(found.id_RC, ops)
        prob_RC = ops.reduce_sum(columns.probabilities(teacher) * columns.here_RX)
        successor_RCr = self.inputs.successor_Vr[found.id_RC]
        return _Scored(
            head=head,
            teacher=teacher,
            label_R=label_R,
            best_R=best_R,
            head_loss_R=self._head_loss(head, teacher, label_R),
            candidate_RC=found.id_RC,
            score_RC=scores(found.logits_RC, self.inputs.context_ASr[place_R], successor_RCr),
            prob_RC=prob_RC,
            wanted_RC=self._wanted(prob_RC, label_R, found.id_RC),
        )

    def _head_loss(self, head: Distribution, teacher: Distribution, label_R: Tensor) -> Tensor:
        """Return the head's loss −Σ t log q of each guess [R]; t is the wanted distribution, q the head's."""
        (logits_RV, log_sum_R), options, ops = head, self.rule.options, self.rule.ops
        label = LocalColumns.of(label_R[:, None], ops)
        there_R = (logits_RV.gather(1, label.column_RX).to(log_sum_R) * label.here_RX).squeeze(1)
        one_R = torch.ones_like(log_sum_R)
        terms = self.rule.kernels.distill_terms(logits_RV[:, None], log_sum_R[:, None], teacher, one_R)
        aligned_R = options.ce_weight * there_R + options.soft_weight * terms[0].squeeze(1)
        return (options.ce_weight + options.soft_weight) * log_sum_R - ops.reduce_sum(aligned_R)

    def _wanted(self, prob_RC: Tensor, label_R: Tensor, id_RC: Tensor) -> Tensor:
        options = self.rule.options
        is_label_RC = (id_RC == label_R[:, None]).to(prob_RC)
        return options.soft_weight * prob_RC + options.ce_weight * is_label_RC

    def _add_gradients(self, place_R: tuple[Tensor, Tensor], scored: _Scored, weight_R: Tensor) -> None:
        """Add the gradients with respect to states, contexts and the table of candidates."""
        assert self.grads is not None
        grad_ASH, grad_ASr = self.grads
        grad_RC = self.rule.options.selector_weight * weight_R[:, None] * scored.selector_grad_RC
        grad_RV, ops = self._logits_gradient_(scored, weight_R, grad_RC), self.rule.ops
        grad_ASH[place_R] = ops.reduce_sum(self.rule.head.products.backward(grad_RV))
        grad_RC = grad_RC.to(grad_ASr.dtype)
        successor_RCr = self.inputs.successor_Vr[scored.candidate_RC]
        grad_ASr[place_R] = (grad_RC[:, None] @ successor_RCr).squeeze(1)
        self.chosen.append((scored.candidate_RC, grad_RC, self.inputs.context_ASr[place_R]))

    def _logits_gradient_(self, scored: _Scored, weight_R: Tensor, grad_RC: Tensor) -> Tensor:
        """Overwrite the logits with their gradient.

        It is weight · ((ce_weight + soft_weight) · q − t), plus the selector's gradient at the candidates; q
        is the head's distribution and t the wanted distribution. The columns of label and candidates are
        rounded only once.
        """
        options, (logits_RV, log_sum_R) = self.rule.options, scored.head
        named_RX = torch.cat([scored.candidate_RC, scored.label_R[:, None]], dim=1)
        columns = LocalColumns.of(named_RX, self.rule.ops)
        all_R, soft_R = ((options.ce_weight + options.soft_weight) * weight_R, options.soft_weight * weight_R)
        there_RX = all_R[:, None] * columns.probabilities(scored.head)
        there_RX = there_RX - soft_R[:, None] * columns.probabilities(scored.teacher)
        is_label_RX = columns.id_RX == scored.label_R[:, None]
        there_RX = there_RX - options.ce_weight * weight_R[:, None] * is_label_RX
        # Compare token ids: a token of another shard has an arbitrary column, maybe the column of a candidate.
        same_RXC = columns.id_RX[..., None] == scored.candidate_RC[:, None]
        there_RX = there_RX + (same_RXC * grad_RC[:, None]).sum(-1)
        factors = all_R[:, None], torch.zeros_like(all_R)[:, None], soft_R[:, None]
        one_R = torch.ones_like(all_R)
        self.rule.kernels.distill_grad_(
            logits_RV[:, None], log_sum_R[:, None], factors, scored.teacher, one_R
        )
        return logits_RV.scatter_(1, columns.column_RX, there_RX.to(logits_RV.dtype))

    def output(self) -> StepOutput:
        """Return loss and metrics, with the gradients attached to the loss."""
        loss = self.metrics.loss(self.scale)
        if self.grads is not None:
            loss = with_gradients(loss, (*self.grads, self._table_gradient()), self.inputs.tensors)
        return self.metrics.output(loss)

    def _table_gradient(self) -> Tensor:
        """Return the gradient of the candidates' table, [V, r]: summed products of derivatives and contexts."""
        table_Vr = self.inputs.successor_Vr.detach()
        if not self.chosen:
            return torch.zeros_like(table_Vr)
        id_RC, grad_RC, context_Rr = (torch.cat(parts) for parts in zip(*self.chosen, strict=True))
        rows_RCr = grad_RC[..., None] * context_Rr[:, None]
        return sum_rows(table_Vr, id_RC.flatten(), rows_RCr.flatten(0, 1))
