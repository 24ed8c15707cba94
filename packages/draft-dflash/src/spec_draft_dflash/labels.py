"""Compute each slot's loss against its label, a token or the target's distribution, with hand-written gradients.

Shapes: R slots that count in the loss, V vocabulary rows of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from spec_kit.block_drafting import teacher_of_guesses
from spec_kit.layers import ROW_LOSSES, LabelColumns, score, sharded_logsumexp_argmax

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch
    from spec_draft_dflash.kernels import DFlashKernels
    from spec_kit.block_drafting import BlockHead, CountedGuesses, GuessFactors
    from spec_kit.drafting import DistilledLoss
    from spec_kit.layers import Teacher


class Compared(NamedTuple):
    """Result of comparing slots' logits with their labels."""

    best_R: Tensor
    """int64 [R]: each slot's arg-max token over all shards."""
    log_sum_R: Tensor
    """Log-sum-exp of each slot's logits over all shards."""
    loss_R: Tensor
    """The loss of each slot [R]; 0 for a label without a row in the head."""
    trained_R: Tensor
    """bool [R]: whether the head has a row for the slot's label: the token, or the distribution's arg-max."""
    gradient_: Callable[[Tensor], Tensor]
    """Overwrites the logits [R, V] with the gradient of the losses, each multiplied by its weight [R]."""


@dataclass(frozen=True)
class HardLabels:
    """Tokens of the data as labels: the loss is cross-entropy."""

    columns: LabelColumns
    trained_R: Tensor
    head: BlockHead
    ops: VocabularyOps
    kernels: DFlashKernels

    @classmethod
    def of(cls, id_R: Tensor, head: BlockHead, ops: VocabularyOps, kernels: DFlashKernels) -> Self:
        """Return the tokens ``id_R`` as labels, located in this shard of the vocabulary."""
        return cls(LabelColumns.of(id_R, head.ids_V), head.has(id_R), head, ops, kernels)

    def compare(self, logits_RV: Tensor) -> Compared:
        """Return each slot's arg-max, loss and gradient function."""
        log_sum_R, best_R = sharded_logsumexp_argmax(logits_RV, self.head.ids_V, self.ops, self.kernels)
        loss_R = log_sum_R - self.ops.reduce_sum(self.columns.logits(logits_RV, log_sum_R.dtype))

        def gradient_(weight_R: Tensor) -> Tensor:
            """Overwrite the logits with weight · (softmax − one-hot label).

            The value in the label's column is rounded only once.
            """
            column_R1, here_R1 = self.columns.column_R1, self.columns.here_R1
            prob_R1 = (logits_RV.gather(1, column_R1).to(log_sum_R.dtype) - log_sum_R[:, None]).exp()
            there_R1 = ((prob_R1 - here_R1.to(prob_R1.dtype)) * weight_R[:, None]).to(logits_RV.dtype)
            self.kernels.scaled_softmax_(logits_RV, log_sum_R, weight_R)
            return logits_RV.scatter_(1, column_R1, there_R1)

        return Compared(best_R, log_sum_R, loss_R * self.trained_R, self.trained_R, gradient_)


@dataclass(frozen=True)
class SoftLabels:
    """The target's distributions as labels: the loss is any loss between distributions."""

    teacher: Teacher
    loss: DistilledLoss
    head: BlockHead
    ops: VocabularyOps
    kernels: DFlashKernels

    @classmethod
    def of(
        cls,
        guesses: CountedGuesses,
        batch: DraftBatch,
        loss: DistilledLoss,
        head: BlockHead,
        ops: VocabularyOps,
        kernels: DFlashKernels,
    ) -> Self:
        """Return the target's distributions for the guesses."""
        return cls(teacher_of_guesses(guesses, batch, head, ops, kernels), loss, head, ops, kernels)

    def compare(self, logits_RV: Tensor) -> Compared:
        """Return each slot's arg-max, loss and gradient function."""
        teacher = self.teacher
        logits_R1V = logits_RV[:, None]
        scored = score(logits_R1V, self.head.ids_V, teacher, self.ops, self.kernels)
        loss_R1, factors = ROW_LOSSES[self.loss](scored, teacher, self.ops, self.kernels)

        def gradient_(weight_R: Tensor) -> Tensor:
            every, below, taught = (factor_R1 * weight_R[:, None] for factor_R1 in factors)
            weighed = (every, below, taught)
            target = (teacher.distribution, teacher.in_vocab_mass_R)
            self.kernels.distill_grad_(logits_R1V, scored.log_sum_RS, weighed, *target)
            return logits_RV

        loss_R = loss_R1.squeeze(1) * teacher.trained_R
        best_R, log_sum_R = scored.best_RS.squeeze(1), scored.log_sum_RS.squeeze(1)
        return Compared(best_R, log_sum_R, loss_R, teacher.trained_R, gradient_)


@dataclass(frozen=True)
class JudgedLabels:
    """Labels of guesses that an engine's target has judged: the loss of a refused guess is KL(draft ‖ target)."""

    ordinary: HardLabels | SoftLabels
    guesses: CountedGuesses
    factors: GuessFactors
    teacher: Teacher

    def compare(self, logits_RV: Tensor) -> Compared:
        """Return each slot's arg-max, loss and gradient function."""
        compared = self.ordinary.compare(logits_RV)
        draft = logits_RV, compared.log_sum_R
        reduce_sum = self.ordinary.ops.reduce_sum
        refused = self.factors.refused_losses(self.guesses, draft, self.teacher.distribution, reduce_sum)
        taught_R = self.teacher.trained_R
        trained_R = compared.trained_R.index_copy(0, refused.row_X, taught_R[refused.row_X])

        def gradient_(weight_R: Tensor) -> Tensor:
            return refused.replace_gradients_(compared.gradient_(weight_R), weight_R)

        return compared._replace(
            loss_R=refused.replace(compared.loss_R) * trained_R, trained_R=trained_R, gradient_=gradient_
        )
