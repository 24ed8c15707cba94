"""Compare the head with labels and teacher, and find its candidates: what losses over candidates share.

The wanted distribution of a guess is t = ce_weight · [the data's token] + soft_weight · p; p is the target's
distribution. The head's loss of a guess is −Σ t log q over the vocabulary, and q is the distribution of the target's
head. With a reduced vocabulary, the sum has only the tokens with a row in the head.

Shapes: S guesses of a block, R guesses of a chunk, C candidates, V rows of the head on this shard (see
``spec_core.ops``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_core import VocabularyOps
from spec_core.records import DraftBatch
from spec_draft_dflash2.candidates import Candidates, LocalColumns
from spec_draft_dflash2.config import CandidateConfig
from spec_draft_dflash2.shape import CandidateShape
from spec_kit.block_drafting import BlockHead, BlockKernels, CountedGuesses, teacher_of_guesses
from spec_kit.layers import Distribution, Teacher, sharded_logsumexp_argmax


@dataclass(frozen=True, kw_only=True)
class HeadGuesses:
    """The guesses of a chunk by the head, with labels and teacher. Values are sums over vocabulary shards."""

    head: Distribution
    teacher: Teacher
    label_R: Tensor
    has_label_R: Tensor
    """Whether the label has a row in the head."""
    best_R: Tensor
    """int64: the token with the head's largest logit."""
    loss_R: Tensor
    """The head's loss."""
    found: Candidates
    target_RC: Tensor
    """The target's logit of each candidate."""

    @property
    def prob_RC(self) -> Tensor:
        """The target's probability of each candidate."""
        log_sum_R = self.teacher.distribution[1]
        return (self.target_RC - log_sum_R[:, None]).exp() * self.teacher.in_vocab_mass_R[:, None]

    @property
    def is_label_RC(self) -> Tensor:
        """Whether a candidate is the data's token, bool [R, C]."""
        return self.found.id_RC == self.label_R[:, None]


@dataclass(frozen=True, kw_only=True)
class CandidateLoss:
    """Computes the head's loss of guesses and its gradient; a subclass adds the loss of what chooses."""

    ops: VocabularyOps
    head: BlockHead
    kernels: BlockKernels
    options: CandidateConfig
    shape: CandidateShape
    weight_S: Tensor

    def compare(
        self, states_RH: Tensor, label_R: Tensor, guesses: CountedGuesses, batch: DraftBatch
    ) -> HeadGuesses:
        """Compare the head with the labels and with the target's distribution of each guess."""
        ops, kernels = self.ops, self.kernels
        logits_RV = self.head.products.forward(states_RH)
        log_sum_R, best_R = sharded_logsumexp_argmax(logits_RV, self.head.ids_V, ops, kernels)
        head = logits_RV, log_sum_R
        teacher = teacher_of_guesses(guesses, batch, self.head, ops, kernels)
        found = Candidates.of(logits_RV, self.head.ids_V, ops, self.shape)
        has_label_R = self.head.has(label_R)
        return HeadGuesses(
            head=head,
            teacher=teacher,
            label_R=label_R,
            has_label_R=has_label_R,
            best_R=best_R,
            loss_R=self._loss(head, teacher, label_R, has_label_R),
            found=found,
            target_RC=ops.reduce_sum(self._columns(found.id_RC).logits(teacher.distribution)),
        )

    def _columns(self, id_RX: Tensor) -> LocalColumns:
        return LocalColumns.of(id_RX, self.head.ids_V)

    def _total(self, has_label_R: Tensor, teacher: Teacher) -> Tensor:
        """Return the sum of the wanted distribution over the head's rows, [R]."""
        mass_R = teacher.in_vocab_mass_R
        return self.options.ce_weight * has_label_R.to(mass_R) + self.options.soft_weight * mass_R

    def _loss(self, head: Distribution, teacher: Teacher, label_R: Tensor, has_label_R: Tensor) -> Tensor:
        logits_RV, log_sum_R = head
        options = self.options
        mass_R = teacher.in_vocab_mass_R
        there_R = self._columns(label_R[:, None]).logits(head).squeeze(1)
        terms = self.kernels.distill_terms(
            logits_RV[:, None], log_sum_R[:, None], teacher.distribution, mass_R
        )
        aligned_R = options.ce_weight * there_R + options.soft_weight * mass_R * terms[0].squeeze(1)
        return self._total(has_label_R, teacher) * log_sum_R - self.ops.reduce_sum(aligned_R)

    def states_gradient(
        self, compared: HeadGuesses, weight_R: Tensor, grad_RC: Tensor, normalised_R: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the states [R, H]; the logits of ``compared`` are lost.

        ``weight_R``: factor on the head's loss. ``grad_RC``: further gradient of the candidates' logits.
        ``normalised_R``: further gradient of the logits' log-sum-exp.
        """
        cross_R = self._total(compared.has_label_R, compared.teacher) * weight_R
        all_R = cross_R if normalised_R is None else cross_R + normalised_R
        grad_RV = self._logits_gradient_(compared, weight_R, all_R, grad_RC)
        return self.ops.reduce_sum(self.head.products.backward(grad_RV))

    def _logits_gradient_(
        self, compared: HeadGuesses, weight_R: Tensor, all_R: Tensor, grad_RC: Tensor
    ) -> Tensor:
        """Overwrite the logits with their gradient.

        It is all · q − weight · t, plus ``grad_RC`` at the candidates; q is the head's distribution and t the wanted
        one. The columns of label and candidates are rounded only once.
        """
        options = self.options
        logits_RV, log_sum_R = compared.head
        label_R = compared.label_R
        teacher, mass_R = compared.teacher.distribution, compared.teacher.in_vocab_mass_R
        soft_R = options.soft_weight * mass_R * weight_R
        columns = self._columns(torch.cat([compared.found.id_RC, label_R[:, None]], dim=1))
        there_RX = all_R[:, None] * columns.probabilities(compared.head)
        there_RX = there_RX - soft_R[:, None] * columns.probabilities(teacher)
        is_label_RX = columns.id_RX == label_R[:, None]
        there_RX = there_RX - options.ce_weight * weight_R[:, None] * is_label_RX
        # Compare token ids: a token of another shard has an arbitrary column, maybe the column of a candidate.
        same_RXC = columns.id_RX[..., None] == compared.found.id_RC[:, None]
        there_RX = there_RX + (same_RXC * grad_RC[:, None]).sum(-1)
        factors = all_R[:, None], torch.zeros_like(all_R)[:, None], soft_R[:, None]
        self.kernels.distill_grad_(logits_RV[:, None], log_sum_R[:, None], factors, teacher, mass_R)
        return logits_RV.scatter_(1, columns.column_RX, there_RX.to(logits_RV.dtype))
