"""Compute loss, metrics and gradients of the guesses that count in the loss, some blocks at a time.

The loss of a guess, before its weight, is ce_weight · CE + l1_weight · ‖p − q‖₁ + confidence_weight · BCE(ĉ,
1 − ½ ‖p − q‖₁). q is the draft's distribution, p the target's, and ĉ the confidence head's probability. With a
reduced vocabulary, q is 0 for a token without a row in the head, and CE is 0 if the data's token has none. The
last term trains the confidence head alone (paper arXiv 2607.05147, section 3; DeepSpec). With ``opd``, a guess that
the target refused has KL(q ‖ p) in place of the first two terms (``spec_kit.block_drafting.judged_guesses``). Loss,
metrics and gradients come from one pass, so only one chunk's logits are in memory.

Shapes: A blocks, S guesses of a block, R guesses of a chunk that count in the loss, r rank, V rows of the
head on this shard (see ``spec_core.ops``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core import VocabularyOps
from spec_core.records import DraftBatch, StepOutput
from spec_draft_dspark.config import DSparkConfig
from spec_kit.block_drafting import (
    BlockHead,
    BlockKernels,
    CountedGuesses,
    GuessFactors,
    GuessMetrics,
    RefusedLosses,
    teacher_of_guesses,
)
from spec_kit.layers import (
    LabelColumns,
    Teacher,
    probabilities,
    sharded_logsumexp_argmax,
    softmax,
    with_gradients,
)

_VALUES = ("accuracy", "acceptance", "acceptance_t1", "guess_loss", "confidence_loss")
_LENGTHS = {
    "acceptance_length": ("accuracy", "accuracy"),
    "acceptance_length_t1": ("accuracy", "acceptance_t1"),
    "expected_length": ("acceptance", "acceptance"),
}


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """The tensors for which the loss computes gradients."""

    states_ASH: Tensor
    """Inputs of the target's head."""
    bias_ASr: Tensor
    """Vectors by which ``bias_Vr`` is multiplied; the product is the Markov head's bias on the logits."""
    bias_Vr: Tensor
    """The Markov head's matrix W2: this shard's rows of the vocabulary."""
    confidence_AS: Tensor | None
    """Logits of the probability that a guess is accepted; None without a confidence head."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields of this object that are not None."""
        some = (self.states_ASH, self.bias_ASr, self.bias_Vr)
        return some if self.confidence_AS is None else (*some, self.confidence_AS)


@dataclass(frozen=True, kw_only=True)
class GuessLoss:
    """Computes the loss of guesses, which has several terms, and weighs each guess."""

    ops: VocabularyOps
    head: BlockHead
    kernels: BlockKernels
    options: DSparkConfig
    weight_S: Tensor

    def __call__(
        self, inputs: HeadInputs, batch: DraftBatch, guesses: CountedGuesses, denominators: Tensor
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
class _Scored:
    """The guesses of a chunk, compared with labels and teacher. Values are sums over vocabulary shards."""

    logits_RV: Tensor
    log_sum_R: Tensor
    teacher: Teacher
    labels: LabelColumns
    has_label_R: Tensor
    """Whether the data's token has a row in the head."""
    correct_R: Tensor
    cross_R: Tensor
    """Cross-entropy to the data's token; 0 if it has no row."""
    overlap_R: Tensor
    """Probability that rejection sampling accepts the guess: Σ min(p, q) = 1 − ½ ‖p − q‖₁, with the target's
    distribution p and the draft's q."""
    chance_R: Tensor
    """The target's probability of the draft's best guess, which engines draft."""
    below_R: Tensor
    """The draft's probability of all tokens to which it gives less probability than the target does."""


class _Sums:
    """Sums of one forward pass over all chunks: loss, metrics, and gradients if they are enabled."""

    def __init__(
        self,
        rule: GuessLoss,
        inputs: HeadInputs,
        batch: DraftBatch,
        factors: GuessFactors,
        metrics: GuessMetrics,
    ) -> None:
        self.rule = rule
        self.inputs = inputs
        self.batch = batch
        self.factors = factors
        self.metrics = metrics
        self.grads = [torch.zeros_like(t) for t in inputs.tensors] if torch.is_grad_enabled() else None
        if self.grads is not None:
            # Chunks are summed here, in float32 or wider.
            self.grads[2] = factors.scale.new_zeros(inputs.bias_Vr.shape)

    def add(self, guesses: CountedGuesses) -> None:
        """Add the loss, metrics and gradients of one chunk: the guesses of some blocks."""
        options = self.rule.options
        place_R = guesses.place_R
        scored = self._score(guesses)
        loss_R = options.ce_weight * scored.cross_R + options.l1_weight * (2 - 2 * scored.overlap_R)
        refused = None
        if self.factors.are_judged:
            draft = scored.logits_RV, scored.log_sum_R
            target = scored.teacher.distribution
            refused = self.factors.refused_losses(guesses, draft, target, self.rule.ops.reduce_sum)
            loss_R = refused.replace(loss_R)
        weight_R = self.factors.of(guesses)
        confidence_R = self._confidence_loss(place_R, scored.overlap_R, weight_R)
        self.metrics.add(
            weight_R * (loss_R + options.confidence_weight * confidence_R),
            accuracy=scored.correct_R,
            acceptance=scored.overlap_R,
            acceptance_t1=scored.chance_R,
            guess_loss=loss_R,
            confidence_loss=confidence_R,
        )
        if self.grads is not None:
            self._add_gradients(place_R, scored, weight_R, refused)

    def _score(self, guesses: CountedGuesses) -> _Scored:
        place_R = guesses.place_R
        rule = self.rule
        ops, head, kernels = rule.ops, rule.head, rule.kernels
        logits_RV = head.products.forward(self.inputs.states_ASH[place_R])
        logits_RV.addmm_(self.inputs.bias_ASr[place_R], self.inputs.bias_Vr.T)
        log_sum_R, best_R = sharded_logsumexp_argmax(logits_RV, head.ids_V, ops, kernels)
        teacher = teacher_of_guesses(guesses, self.batch, head, ops, kernels)
        mass_R = teacher.in_vocab_mass_R
        terms = kernels.distill_terms(logits_RV[:, None], log_sum_R[:, None], teacher.distribution, mass_R)
        overlap_R, below_R = (ops.reduce_sum(term.squeeze(1)) for term in terms[1:])
        id_R = self.batch.input_ids_T[guesses.label_R]
        labels = LabelColumns.of(id_R, head.ids_V)
        has_label_R = head.has(id_R)
        cross_R = log_sum_R - ops.reduce_sum(labels.logits(logits_RV, log_sum_R.dtype))
        chance_R = probabilities(best_R[:, None], head.ids_V, teacher.distribution, ops).squeeze(1)
        return _Scored(
            logits_RV=logits_RV,
            log_sum_R=log_sum_R,
            teacher=teacher,
            labels=labels,
            has_label_R=has_label_R,
            correct_R=best_R == id_R,
            cross_R=cross_R * has_label_R,
            overlap_R=overlap_R,
            chance_R=chance_R * mass_R,
            below_R=below_R,
        )

    def _confidence_loss(self, place_R: tuple[Tensor, Tensor], chance_R: Tensor, weight_R: Tensor) -> Tensor:
        """Return the confidence head's cross-entropy for each guess [R]; zeros if the draft has no such head.

        If gradients are enabled, store in ``self.grads`` the gradient with respect to the head's logits.
        ``chance_R``: the probability of acceptance that the head should predict for each guess.
        """
        if self.inputs.confidence_AS is None:
            return torch.zeros_like(chance_R)
        logit_R = self.inputs.confidence_AS[place_R].to(chance_R)
        if self.grads is not None:
            slope_R = weight_R * self.rule.options.confidence_weight * (logit_R.sigmoid() - chance_R)
            self.grads[3][place_R] = slope_R.to(self.grads[3].dtype)
        return F.binary_cross_entropy_with_logits(logit_R, chance_R, reduction="none")

    def _add_gradients(
        self,
        place_R: tuple[Tensor, Tensor],
        scored: _Scored,
        weight_R: Tensor,
        refused: RefusedLosses | None,
    ) -> None:
        """Add the gradients of ``guess_loss`` with respect to states, bias vectors and W2."""
        assert self.grads is not None
        grad_RV = self._gradient_(scored, weight_R)
        if refused is not None:
            refused.replace_gradients_(grad_RV, weight_R)
        ops = self.rule.ops
        grad_ASH, grad_ASr, grad_Vr, *_ = self.grads
        grad_ASH[place_R] = ops.reduce_sum(self.rule.head.products.backward(grad_RV))
        grad_ASr[place_R] = ops.reduce_sum(grad_RV @ self.inputs.bias_Vr)
        grad_Vr += grad_RV.T @ self.inputs.bias_ASr[place_R]

    def _gradient_(self, scored: _Scored, weight_R: Tensor) -> Tensor:
        """Overwrite the logits with their gradient.

        Let p be the target's and q the draft's distribution, w the guess's weight, c ce_weight (0 if the label has no
        row), and B the sum of q over the tokens with q < p. A token's gradient is w · (c + 2 · l1_weight · B) · q. If
        q < p, it is less by 2 · w · l1_weight · q; at the label it is less by w · c. This follows from
        d‖p − q‖₁ / d logit = q (s − Σ s q) with s = 1 − 2 [q < p]. The label's value is rounded only once.
        """
        options = self.rule.options
        column_R1 = scored.labels.column_R1
        teacher, mass_R = scored.teacher.distribution, scored.teacher.in_vocab_mass_R
        cross_R = weight_R * options.ce_weight * scored.has_label_R
        all_R = cross_R + 2 * options.l1_weight * weight_R * scored.below_R
        below_R = -2 * options.l1_weight * weight_R
        q_R, p_R = (
            softmax(logits_RV.gather(1, column_R1), log_sum_R).squeeze(1).to(weight_R)
            for logits_RV, log_sum_R in ((scored.logits_RV, scored.log_sum_R), teacher)
        )
        there_R = (all_R + below_R * (q_R < mass_R * p_R)) * q_R - cross_R * scored.labels.here_R1.squeeze(1)
        factors = all_R[:, None], below_R[:, None], torch.zeros_like(all_R)[:, None]
        self.rule.kernels.distill_grad_(
            scored.logits_RV[:, None], scored.log_sum_R[:, None], factors, teacher, mass_R
        )
        return scored.logits_RV.scatter_(1, column_R1, there_R[:, None].to(scored.logits_RV.dtype))

    def output(self) -> StepOutput:
        """Return loss and metrics, with the gradients attached to the loss."""
        loss = self.metrics.loss(self.factors.scale)
        if self.grads is not None:
            loss = with_gradients(loss, self.grads, self.inputs.tensors)
        return self.metrics.output(loss, self.batch)
