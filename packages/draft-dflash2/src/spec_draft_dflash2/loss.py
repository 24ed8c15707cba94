"""Compute loss, metrics and gradients of the guesses that count in the loss, some blocks at a time.

The loss of a guess, before its weight, is the head's loss −Σ t log q (see ``candidate_loss``) + selector_weight ·
(−Σ t log s). The second sum is over the candidates alone, and s is the distribution from which the draft guesses. A
token that is no candidate trains the head only, because the selector never chooses it. With ``opd``, a guess that the
target refused has KL(s ‖ p) in place of both sums (``spec_kit.block_drafting.judged_guesses``). Loss, metrics and
gradients come from one pass, so only one chunk's logits are in memory.

Shapes: A blocks, S guesses of a block, R guesses of a chunk that count in the loss, C candidates, r rank, V tokens of
the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spec_core.records import DraftBatch, StepOutput
from spec_draft_dflash2.candidate_loss import CandidateLoss, HeadGuesses
from spec_draft_dflash2.config import DFlash2Config
from spec_draft_dflash2.selector import scores, sum_rows
from spec_kit.block_drafting import CountedGuesses, GuessFactors, GuessMetrics, RefusedLosses
from spec_kit.layers import with_gradients

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
class SelectorLoss(CandidateLoss):
    """Computes the loss of guesses, which has several terms, and weighs each guess."""

    options: DFlash2Config

    def __call__(
        self, inputs: SelectorInputs, batch: DraftBatch, guesses: CountedGuesses, denominators: Tensor
    ) -> StepOutput:
        """Return loss and metrics of the blocks, divided by the global batch's ``denominators``."""
        metrics = GuessMetrics(guesses, len(self.weight_S), _VALUES, _LENGTHS)
        factors = GuessFactors(self.weight_S, denominators, batch, inputs.states_ASH, opd=self.options.opd)
        totals = _Sums(self, inputs, batch, factors, metrics)
        with torch.no_grad():
            for chunk in guesses.chunks(self.ops, self.head, len(self.weight_S)):
                totals.add(chunk)
        return totals.output()


@dataclass(frozen=True)
class _Choice:
    """The selector's scores of the candidates of a chunk's guesses, and what they should be."""

    compared: HeadGuesses
    score_RC: Tensor
    wanted_RC: Tensor
    """The wanted distribution t at each candidate."""

    @property
    def guess_R(self) -> Tensor:
        """int64 [R]: the candidate to which the selector gives the largest score."""
        return self.compared.found.id_RC.gather(1, self._choice_R1).squeeze(1)

    @property
    def chance_R(self) -> Tensor:
        """The target's probability of the guess, [R]."""
        return self.compared.prob_RC.gather(1, self._choice_R1).squeeze(1)

    @cached_property
    def _choice_R1(self) -> Tensor:
        return self.score_RC.argmax(1, keepdim=True)

    @property
    def loss_R(self) -> Tensor:
        """The selector's loss −Σ t log s over the candidates, [R]."""
        return -(self.wanted_RC * self.score_RC.log_softmax(1)).sum(1)

    @property
    def grad_RC(self) -> Tensor:
        """Derivatives of ``loss_R`` with respect to the scores."""
        return self.wanted_RC.sum(1, keepdim=True) * self.score_RC.softmax(1) - self.wanted_RC

    def refused_losses(self, guesses: CountedGuesses, factors: GuessFactors) -> RefusedLosses:
        """Return KL(s ‖ p) of the refused guesses; every vocabulary shard has all candidates."""
        draft = self.score_RC, self.score_RC.logsumexp(1)
        target = self.compared.target_RC, self.compared.teacher.distribution[1]
        return factors.refused_losses(guesses, draft, target, lambda whole_X: whole_X)


class _Sums:
    """Sums of one forward pass over all chunks: loss, metrics, and gradients if they are enabled."""

    def __init__(
        self,
        rule: SelectorLoss,
        inputs: SelectorInputs,
        batch: DraftBatch,
        factors: GuessFactors,
        metrics: GuessMetrics,
    ) -> None:
        self.rule = rule
        self.inputs = inputs
        self.batch = batch
        self.factors = factors
        self.metrics = metrics
        self.grads: tuple[Tensor, Tensor] | None = None
        self.chosen: list[tuple[Tensor, Tensor, Tensor]] = []
        """Candidates [R, C], derivatives with respect to their scores [R, C], and contexts [R, r] of each chunk."""
        if torch.is_grad_enabled():
            self.grads = torch.zeros_like(inputs.states_ASH), torch.zeros_like(inputs.context_ASr)

    def add(self, guesses: CountedGuesses) -> None:
        """Add the loss, metrics and gradients of one chunk: the guesses of some blocks."""
        options = self.rule.options
        place_R = guesses.place_R
        label_R = self.batch.input_ids_T[guesses.label_R]
        compared = self.rule.compare(self.inputs.states_ASH[place_R], label_R, guesses, self.batch)
        choice = self._choose(compared, place_R)
        loss_R = compared.loss_R + options.selector_weight * choice.loss_R
        refused = choice.refused_losses(guesses, self.factors) if self.factors.are_judged else None
        if refused is not None:
            loss_R = refused.replace(loss_R)
        weight_R = self.factors.of(guesses)
        self.metrics.add(
            weight_R * loss_R,
            accuracy=choice.guess_R == label_R,
            acceptance_t1=choice.chance_R,
            head_accuracy=compared.best_R == label_R,
            recall=compared.is_label_RC.any(1),
            head_loss=compared.loss_R,
            selector_loss=choice.loss_R,
        )
        if self.grads is not None:
            self._add_gradients(place_R, choice, weight_R, refused)

    def _choose(self, compared: HeadGuesses, place_R: tuple[Tensor, Tensor]) -> _Choice:
        options = self.rule.options
        found = compared.found
        prob_RC = compared.prob_RC
        successor_RCr = self.inputs.successor_Vr[found.id_RC]
        score_RC = scores(found.logits_RC, self.inputs.context_ASr[place_R], successor_RCr)
        label_RC = compared.is_label_RC.to(prob_RC)
        return _Choice(compared, score_RC, options.soft_weight * prob_RC + options.ce_weight * label_RC)

    def _add_gradients(
        self,
        place_R: tuple[Tensor, Tensor],
        choice: _Choice,
        weight_R: Tensor,
        refused: RefusedLosses | None,
    ) -> None:
        """Add the gradients with respect to states, contexts and the table of candidates."""
        assert self.grads is not None
        grad_ASH, grad_ASr = self.grads
        grad_RC = self.rule.options.selector_weight * weight_R[:, None] * choice.grad_RC
        if refused is not None:
            refused.replace_gradients_(grad_RC, weight_R)
            weight_R = weight_R.index_fill(0, refused.row_X, 0)  # of the head's own loss
        grad_ASH[place_R] = self.rule.states_gradient(choice.compared, weight_R, grad_RC)
        grad_RC = grad_RC.to(grad_ASr.dtype)
        id_RC = choice.compared.found.id_RC
        grad_ASr[place_R] = (grad_RC[:, None] @ self.inputs.successor_Vr[id_RC]).squeeze(1)
        self.chosen.append((id_RC, grad_RC, self.inputs.context_ASr[place_R]))

    def output(self) -> StepOutput:
        """Return loss and metrics, with the gradients attached to the loss."""
        loss = self.metrics.loss(self.factors.scale)
        if self.grads is not None:
            loss = with_gradients(loss, (*self.grads, self._table_gradient()), self.inputs.tensors)
        return self.metrics.output(loss, self.batch)

    def _table_gradient(self) -> Tensor:
        """Return the gradient of the candidates' table, [V, r]: summed products of derivatives and contexts."""
        table_Vr = self.inputs.successor_Vr.detach()
        if not self.chosen:
            return torch.zeros_like(table_Vr)
        id_RC, grad_RC, context_Rr = (torch.cat(parts) for parts in zip(*self.chosen, strict=True))
        rows_RCr = grad_RC[..., None] * context_Rr[:, None]
        return sum_rows(table_Vr, id_RC.flatten(), rows_RCr.flatten(0, 1))
