"""Compare the draft's logits with the teacher's distributions by losses with explicit gradients.

The losses are ``ce`` (cross-entropy), ``lk_alpha`` and ``lk_lambda`` (``ROW_LOSSES``). Every reduction over the
vocabulary goes through ``ops``, so the heads of draft and target may be sharded by vocabulary. Only logits and
their log-sum-exp are stored, no distributions. The gradient overwrites the logits, the largest tensors of a step.

Each of these losses has the gradient a · q + b · (q if q < p̂, else 0) − c · p with respect to a row's logits. q: the
draft's distribution; p̂: the teacher's distribution; p: the same, renormalised over the draft's vocabulary
(``Teacher``); a, b, c: factors of each row that depend on the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_kit.layers.loss_parts import probabilities, sharded_logsumexp_argmax
from spec_kit.layers.plain_kernels import upcast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_kit.drafting.decoder_shape import DistilledLoss
    from spec_kit.layers.plain_kernels import DecoderKernels, Distribution

    Factors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at R positions."""

    distribution: Distribution
    """p: softmax over the target tokens that have a row in the draft's head."""
    in_vocab_mass_R: Tensor
    """Total probability of the draft's tokens in the *whole* vocabulary's softmax: p̂ = in_vocab_mass · p."""
    best_R: Tensor
    """int64: arg-max over the whole vocabulary."""
    trained_R: Tensor
    """bool: whether the arg-max has a row in the draft's head; only such positions are trained."""

    def take(self, row_X: Tensor) -> Teacher:
        """Return the distributions at X positions. ``row_X``: int64, indices among the R positions."""
        logits_RV, log_sum_R = self.distribution
        return Teacher(
            (logits_RV.index_select(0, row_X), log_sum_R[row_X]),
            self.in_vocab_mass_R[row_X],
            self.best_R[row_X],
            self.trained_R[row_X],
        )


@dataclass(frozen=True)
class Scored:
    """The draft's logits, compared with the teacher: S rows for each of R positions."""

    log_sum_RS: Tensor
    """Log-sum-exp of the draft's logits."""
    best_RS: Tensor
    """int64: arg-max of the draft's distribution q, as a token id of the target."""
    cross_RS: Tensor
    """Cross-entropy −Σ p log q of the draft's distribution q under the teacher's p."""
    overlap_RS: Tensor
    """α = Σ min(p̂, q): the probability that the target accepts a guess drawn from q."""
    chance_RS: Tensor
    """p̂ of the arg-max of q: the probability that the target, at temperature 1, accepts the draft's best guess."""
    below_RS: Tensor
    """Sum of q over the tokens with q < p̂."""


def teach(
    ops: VocabularyOps, kernels: DecoderKernels, hidden_RH: Tensor, ids_V: Tensor, vocab_mask_V: Tensor | None
) -> Teacher:
    """Return the target's distribution at R positions. ``hidden_RH``: inputs of the target's final norm.

    ``ids_V``: int64, target id of each row of the draft's head. ``vocab_mask_V``: bool over the whole target
    vocabulary: whether the token has a row in the draft's head; None means all have one.
    """
    logits_RV = ops.teacher_logits(hidden_RH)
    first, stop = ops.vocab_range
    every_V = torch.arange(first, stop, device=logits_RV.device)
    log_sum_R, best_R = sharded_logsumexp_argmax(logits_RV, every_V, ops, kernels)
    if vocab_mask_V is None:
        every = torch.ones_like(log_sum_R)
        return Teacher((logits_RV, log_sum_R), every, best_R, every.bool())
    logits_RV = logits_RV[:, ids_V - first]
    in_vocab_sum_R, _ = sharded_logsumexp_argmax(logits_RV, ids_V, ops, kernels)
    return Teacher(
        (logits_RV, in_vocab_sum_R), (in_vocab_sum_R - log_sum_R).exp(), best_R, vocab_mask_V[best_R]
    )


def score(
    logits_RSV: Tensor, ids_V: Tensor, teacher: Teacher, ops: VocabularyOps, kernels: DecoderKernels
) -> Scored:
    """Compare each row of the draft's logits with the teacher's distribution; return the results [R, S]."""
    log_sum_RS, best_RS = sharded_logsumexp_argmax(logits_RSV, ids_V, ops, kernels)
    sums = kernels.distill_terms(logits_RSV, log_sum_RS, teacher.distribution, teacher.in_vocab_mass_R)
    aligned_RS, overlap_RS, below_RS = map(ops.reduce_sum, sums)
    chance_RS = probabilities(best_RS, ids_V, teacher.distribution, ops) * teacher.in_vocab_mass_R[:, None]
    return Scored(log_sum_RS, best_RS, log_sum_RS - aligned_RS, overlap_RS, chance_RS, below_RS)


def _cross_entropy(
    scored: Scored, teacher: Teacher, ops: VocabularyOps, kernels: DecoderKernels
) -> tuple[Tensor, Factors]:
    one_RS = torch.ones_like(scored.cross_RS)
    return scored.cross_RS, (one_RS, torch.zeros_like(one_RS), one_RS)


def _lk_alpha(
    scored: Scored, teacher: Teacher, ops: VocabularyOps, kernels: DecoderKernels
) -> tuple[Tensor, Factors]:
    """Return −log α [R, S] and the factors a, b, c of its gradient (see this module's docstring).

    α = Σ min(q, p̂) is the probability that the target accepts a guess drawn from q. dα/dlogits = u − q · Σ u, with
    u = q if q < p̂, else 0.
    """
    overlap_RS = scored.overlap_RS.clamp(min=torch.finfo(scored.overlap_RS.dtype).tiny)
    factors = scored.below_RS / overlap_RS, -1 / overlap_RS, torch.zeros_like(overlap_RS)
    return -overlap_RS.log(), factors


def _lk_lambda(
    scored: Scored, teacher: Teacher, ops: VocabularyOps, kernels: DecoderKernels
) -> tuple[Tensor, Factors]:
    """Return the loss λ · KL(p ‖ q) + (1 − λ)(1 − α) [R, S], and the factors of its gradient.

    λ = exp(−3 α) counts as a constant in the gradient. ``_lk_alpha`` explains α, and this module's docstring
    explains p, q and the factors a, b, c.
    """
    (logits_RV, log_sum_R), in_vocab_mass_R = teacher.distribution, teacher.in_vocab_mass_R
    own, *_ = kernels.distill_terms(
        logits_RV[:, None], log_sum_R[:, None], teacher.distribution, in_vocab_mass_R
    )
    entropy_R1 = log_sum_R[:, None] - ops.reduce_sum(own)
    share_RS = (-3 * scored.overlap_RS).exp()
    value_RS = share_RS * (scored.cross_RS - entropy_R1) + (1 - share_RS) * (1 - scored.overlap_RS)
    return value_RS, (share_RS + (1 - share_RS) * scored.below_RS, share_RS - 1, share_RS)


def reverse_kl(
    logits_RV: Tensor,
    log_sum_R: Tensor,
    distribution: Distribution,
    reduce_sum: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return KL(q ‖ p) [R] of one row of the draft's logits for each position, and its gradient [R, V] by them.

    ``log_sum_R``: log-sum-exp of the logits over all shards. ``distribution``: ``Teacher.distribution``.
    ``reduce_sum``: sums over the shards.
    """
    own_RV, teacher_RV = (
        upcast(logits) - total_R[:, None] for logits, total_R in ((logits_RV, log_sum_R), distribution)
    )
    ratio_RV = own_RV - teacher_RV
    own_RV.exp_()
    value_R = reduce_sum((own_RV * ratio_RV).sum(-1))
    return value_R, own_RV * (ratio_RV - value_R[:, None])


# Each loss returns its values [R, S], and the factors a, b, c [R, S] of their gradients.
ROW_LOSSES: Mapping[
    DistilledLoss, Callable[[Scored, Teacher, VocabularyOps, DecoderKernels], tuple[Tensor, Factors]]
] = {
    "ce": _cross_entropy,
    "lk_alpha": _lk_alpha,
    "lk_lambda": _lk_lambda,
}
