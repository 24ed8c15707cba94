"""Compute the loss of the blocks' slots, its metrics and its gradients, some blocks at a time.

Only the states of slots that count in the loss are multiplied by the head. Loss, metrics and the
gradient with respect to the states come from the same pass, so only one chunk's logits are in memory.

Shapes: A blocks of B slots, S = B − 1 slots that guess, R slots that count in the loss, C blocks of a chunk,
V rows of the head on this shard (see ``spec_core.ops``).

With a reduced vocabulary, a slot whose target has no row in the head has loss 0, but its weight counts in the
denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_core import VocabularyOps
from spec_core.records import DraftBatch, StepOutput
from spec_draft_dflash.config import SOFT_LOSSES, LossKind
from spec_draft_dflash.kernels import DFlashKernels
from spec_draft_dflash.labels import Compared, HardLabels, JudgedLabels, SoftLabels
from spec_kit.block_drafting import BlockHead, CountedGuesses, GuessFactors, GuessMetrics, teacher_of_guesses
from spec_kit.layers import with_gradients

_VALUES = ("accuracy", "slot_loss")
_LENGTHS = {"acceptance_length": ("accuracy", "accuracy")}


@dataclass(frozen=True, kw_only=True)
class BlockLoss:
    """Computes the loss of blocks; it chooses the label and the weight of each slot."""

    ops: VocabularyOps
    head: BlockHead
    kernels: DFlashKernels
    kind: LossKind
    weight_S: Tensor
    """float [S]: weight of each of a block's S guesses, for all losses but ``dpace``, which computes its
    own."""
    alpha: float
    """The option ``dpace_alpha``."""
    opd: bool = False
    """The option ``opd``: refused guesses have KL(draft ‖ target)."""

    def __call__(
        self, states_ASH: Tensor, batch: DraftBatch, guesses: CountedGuesses, denominators: Tensor
    ) -> StepOutput:
        """Return loss and metrics of the blocks' states, divided by the global batch's ``denominators``."""
        metrics = GuessMetrics(guesses, len(self.weight_S), _VALUES, _LENGTHS)
        factors = GuessFactors(self.weight_S, denominators, batch, states_ASH, opd=self.opd)
        totals = _BlockSums(self, states_ASH, batch, factors, metrics)
        has_teacher = self.kind in SOFT_LOSSES or self.opd
        with torch.no_grad():
            for chunk in guesses.chunks(self.ops, self.head, len(self.weight_S), has_teacher=has_teacher):
                totals.add(chunk)
        return totals.output()

    def labels(
        self, batch: DraftBatch, guesses: CountedGuesses, factors: GuessFactors
    ) -> HardLabels | SoftLabels | JudgedLabels:
        """Return the labels of some guesses.

        A soft label is the target's distribution, computed from its state at the token before the label.
        """
        if soft := SOFT_LOSSES.get(self.kind):
            labels = SoftLabels.of(guesses, batch, soft, self.head, self.ops, self.kernels)
        else:
            labels = HardLabels.of(batch.input_ids_T[guesses.label_R], self.head, self.ops, self.kernels)
        if not factors.are_judged:
            return labels
        if isinstance(labels, SoftLabels):
            return JudgedLabels(labels, guesses, factors, labels.teacher)
        teacher = teacher_of_guesses(guesses, batch, self.head, self.ops, self.kernels)
        return JudgedLabels(labels, guesses, factors, teacher)

    def weights(self, compared: Compared, guesses: CountedGuesses, factors: GuessFactors) -> Tensor:
        """Return the factors [R] on the losses of the guesses; 0 for a label without a row."""
        loss_R, trained_R = compared.loss_R, compared.trained_R
        if self.kind != "dpace":
            return factors.of(guesses) * trained_R
        # D-PACE: P_k is the (smoothed) chance that slots 1 to k are accepted; slot k weighs what it can still add.
        accepted_R = (1 - self.alpha) * (-loss_R).exp() * trained_R + self.alpha
        reached_AS = guesses.table(accepted_R, len(self.weight_S)).cumprod(1)
        weight_AS = reached_AS.flip(1).cumsum(1).flip(1)
        return weight_AS[guesses.block_R - guesses.first, guesses.guess_R] * trained_R * factors.scale


class _BlockSums:
    """Sums of one forward pass over all chunks: loss, metrics, and the states' gradient if it is enabled."""

    def __init__(
        self,
        rule: BlockLoss,
        states_ASH: Tensor,
        batch: DraftBatch,
        factors: GuessFactors,
        metrics: GuessMetrics,
    ) -> None:
        self.rule = rule
        self.states_ASH = states_ASH
        self.batch = batch
        self.factors = factors
        self.metrics = metrics
        self.grad_ASH = torch.zeros_like(states_ASH) if torch.is_grad_enabled() else None

    def add(self, guesses: CountedGuesses) -> None:
        """Add the loss, metrics and gradients of one chunk: the guesses of some blocks."""
        head = self.rule.head.products
        place_R = guesses.place_R
        logits_RV = head.forward(self.states_ASH[place_R])
        compared = self.rule.labels(self.batch, guesses, self.factors).compare(logits_RV)
        correct_R = compared.best_R == self.batch.input_ids_T[guesses.label_R]
        weight_R = self.rule.weights(compared, guesses, self.factors)
        self.metrics.add(weight_R * compared.loss_R, accuracy=correct_R, slot_loss=compared.loss_R)
        if self.grad_ASH is not None:
            grad_RH = head.backward(compared.gradient_(weight_R))
            self.grad_ASH[place_R] = self.rule.ops.reduce_sum(grad_RH)

    def output(self) -> StepOutput:
        """Return loss and metrics, with the gradients attached to the loss."""
        loss = self.metrics.loss(self.factors.scale)
        if self.grad_ASH is not None:
            loss = with_gradients(loss, (self.grad_ASH,), (self.states_ASH,))
        return self.metrics.output(loss, self.batch)
