"""What one row of the head is compared with, and the three losses with their gradients by hand.

Every reduction over the vocabulary goes through ``ops``, so the rows of the head and of the target may be sharded.
Laws replace the logits that they are made from, in place: the two are the step's largest tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core.vocabulary_rows import arg_max, softmax_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from spec_core.ops import VocabularyOps
    from spec_draft_eagle3.config import LossKind


@dataclass(frozen=True)
class Teacher:
    """The target's law at R positions."""

    law_RV: Tensor
    """p: softmax over the kept rows."""
    mass_R: Tensor
    """Share of the law over the *whole* vocabulary that the kept rows hold: p̂ = mass · p."""
    best_R: Tensor
    """int64: arg-max over the whole vocabulary."""
    kept_R: Tensor
    """bool: the arg-max is among the kept rows, so the row trains."""


@dataclass(frozen=True)
class Scored:
    """The draft's law for S rows of each position, next to the teacher's."""

    law_RSV: Tensor
    """q"""
    cross_RS: Tensor
    """−Σ p log q"""
    overlap_RS: Tensor
    """α = Σ min(p̂, q): the expected acceptance."""


def teach(ops: VocabularyOps, hidden_RH: Tensor, ids_V: Tensor, kept_V: Tensor | None) -> Teacher:
    """The target's law from the input of its final norm; see HeadLoss for ``ids_V`` and ``kept_V``."""
    logits_RV = ops.teacher_logits(hidden_RH)
    first, stop = ops.vocab_range
    best_R = arg_max(logits_RV, torch.arange(first, stop, device=logits_RV.device), ops)
    if kept_V is None:
        law_RV, log_sum_R = logits_RV, softmax_(logits_RV, ops)
        return Teacher(law_RV, torch.ones_like(log_sum_R), best_R, torch.ones_like(best_R, dtype=torch.bool))
    law_RV = logits_RV[:, ids_V - first]
    log_sum_R = softmax_(logits_RV, ops)
    return Teacher(law_RV, (softmax_(law_RV, ops) - log_sum_R).exp(), best_R, kept_V[best_R])


def score(logits_RSV: Tensor, teacher: Teacher, ops: VocabularyOps) -> Scored:
    """Consumes the logits: their memory becomes the law."""
    aligned_RS = ops.reduce_sum(torch.matmul(logits_RSV, teacher.law_RV[..., None]).squeeze(-1))
    cross_RS = softmax_(logits_RSV, ops) - aligned_RS
    overlap_RS = ops.reduce_sum(torch.minimum(logits_RSV, _full_law(teacher)).sum(-1))
    return Scored(logits_RSV, cross_RS, overlap_RS)


def _cross_entropy(scored: Scored, teacher: Teacher, ops: VocabularyOps) -> tuple[Tensor, Tensor]:
    return scored.cross_RS, scored.law_RSV.sub_(teacher.law_RV[:, None])


def _lk_alpha(scored: Scored, teacher: Teacher, ops: VocabularyOps) -> tuple[Tensor, Tensor]:
    """−log α"""
    overlap_RS = scored.overlap_RS.clamp(min=torch.finfo(scored.overlap_RS.dtype).tiny)
    return -overlap_RS.log(), _overlap_gradient(scored, teacher, ops).mul_(-1 / overlap_RS[..., None])


def _lk_lambda(scored: Scored, teacher: Teacher, ops: VocabularyOps) -> tuple[Tensor, Tensor]:
    """λ · KL(p ‖ q) + (1 − λ)(1 − α) with λ = exp(−3 α), a constant for the gradient."""
    entropy_R = -ops.reduce_sum(torch.xlogy(teacher.law_RV, teacher.law_RV).sum(-1))
    share_RS = (-3 * scored.overlap_RS).exp()
    value_RS = share_RS * (scored.cross_RS - entropy_R[:, None]) + (1 - share_RS) * (1 - scored.overlap_RS)
    overlap_RSV = _overlap_gradient(scored, teacher, ops).mul_((1 - share_RS)[..., None])
    divergence_RSV = scored.law_RSV.sub_(teacher.law_RV[:, None]).mul_(share_RS[..., None])
    return value_RS, divergence_RSV.sub_(overlap_RSV)


# Values [R, S] and their gradients with respect to the logits [R, S, V], which may take q's memory.
ROW_LOSSES: Mapping[LossKind, Callable[[Scored, Teacher, VocabularyOps], tuple[Tensor, Tensor]]] = {
    "ce": _cross_entropy,
    "lk_alpha": _lk_alpha,
    "lk_lambda": _lk_lambda,
}


def _overlap_gradient(scored: Scored, teacher: Teacher, ops: VocabularyOps) -> Tensor:
    """dα/dlogits: the rows with q < p̂ pull, all rows share the softmax's normalisation."""
    law_RSV = scored.law_RSV
    below_RSV = law_RSV * (law_RSV < _full_law(teacher))
    return below_RSV.sub_(law_RSV * ops.reduce_sum(below_RSV.sum(-1))[..., None])


def _full_law(teacher: Teacher) -> Tensor:
    """p̂ [R, 1, V]: the kept rows' probabilities under the law over the whole vocabulary."""
    return (teacher.law_RV * teacher.mass_R[:, None])[:, None]
