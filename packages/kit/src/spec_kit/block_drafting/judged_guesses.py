"""Weigh the losses of guesses, and train guesses that the target refused by Draft-OPD (arXiv 2605.29343).

An engine's round says which of its guesses the target accepted. With the option ``opd``, a refused guess has the loss
KL(q ‖ p) in place of the draft's own. q is the distribution from which the draft guesses. p is the target's
distribution over the tokens with a row in the head. Accepted and refused guesses have half of the weight each.

Shapes: S guesses of a block, R guesses of a chunk, X refused guesses of a chunk, V logits of a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_core import to_device_async
from spec_core.records import DraftBatch, Supervision
from spec_kit.block_drafting.blocks import BlockRule, CountedGuesses
from spec_kit.block_drafting.metrics import loss_scale
from spec_kit.layers import Distribution, are_refused, reverse_kl


def judged_denominators(rule: BlockRule, weight_S: Tensor, supervision: Sequence[Supervision]) -> Tensor:
    """Return the number of accepted guesses and the sum of the refused guesses' weights, float64 [2].

    Guesses of a sample without guess depths count as accepted. ``weight_S``: float64, weights of a block's guesses.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for sample in supervision:
        anchor_A, counted_A = rule.draw(sample)
        if sample.guess_depth is None:
            last_A = counted_A[:0]
        else:  # of a round only the last guess can be refused
            last_A = counted_A[are_refused(sample.guess_depth)[anchor_A + counted_A]] - 1
        total += torch.stack([counted_A.sum() - len(last_A), weight_S[last_A].sum()])
    return total


class GuessFactors:
    """The factors on the losses of a batch's guesses, and which guesses were refused."""

    def __init__(
        self, weight_S: Tensor, denominators: Tensor, batch: DraftBatch, like: Tensor, *, opd: bool
    ) -> None:
        """Compute the factors on the device of ``like``, in float32 or wider.

        ``weight_S``: weight of each guess of a block. ``denominators``: the sum of these weights in the global batch
        comes first; with ``opd``, ``judged_denominators`` comes last.
        """
        self.scale = loss_scale(denominators, like)
        """1 / the sum of all weights, or 0."""
        self.are_judged = opd and not batch.evaluates  # an evaluation takes no guess as refused
        refused = self.scale
        if self.are_judged:
            self._accepted, refused = (loss_scale(denominators[index:], like) / 2 for index in (-2, -1))
            depth_T = batch.guess_depth_T
            self._refused_T = are_refused(torch.zeros_like(batch.loss_mask_T) if depth_T is None else depth_T)
        self._factor_S = weight_S.to(self.scale) * refused

    def of(self, guesses: CountedGuesses) -> Tensor:
        """Return the factor on the loss of each guess of a chunk, [R]."""
        factor_R = self._factor_S[guesses.guess_R]
        if not self.are_judged:
            return factor_R
        row_X = self.refused(guesses)
        return self._accepted.expand(len(factor_R)).index_copy(0, row_X, factor_R[row_X])

    def refused(self, guesses: CountedGuesses) -> Tensor:
        """Return the indices of the refused guesses of a chunk, int64 [X]."""
        refused_R = self._refused_T[guesses.before_R + 1]
        return to_device_async(refused_R.nonzero().squeeze(1), self.scale.device)

    def refused_losses(
        self,
        guesses: CountedGuesses,
        draft: Distribution,
        target: Distribution,
        reduce_sum: Callable[[Tensor], Tensor],
    ) -> RefusedLosses:
        """Return KL(draft ‖ target) of the refused guesses of a chunk.

        ``draft``, ``target``: distributions of all guesses, given by logits and log-sum-exps. ``reduce_sum``: sums
        over vocabulary shards.
        """
        row_X = self.refused(guesses)
        logits_XV, log_sum_X = (part[row_X] for part in draft)
        target_XV, target_sum_X = (part[row_X] for part in target)
        return RefusedLosses(row_X, *reverse_kl(logits_XV, log_sum_X, (target_XV, target_sum_X), reduce_sum))


@dataclass(frozen=True)
class RefusedLosses:
    """KL(draft ‖ target) of the refused guesses of a chunk, and its gradients."""

    row_X: Tensor
    """int64: indices of the guesses in the chunk."""
    value_X: Tensor
    grad_XV: Tensor
    """Derivatives of ``value_X`` with respect to the draft's logits."""

    def replace(self, loss_R: Tensor) -> Tensor:
        """Return the losses of a chunk's guesses, with these in place of the refused guesses' own."""
        return loss_R.index_copy(0, self.row_X, self.value_X.to(loss_R))

    def replace_gradients_(self, grad_RV: Tensor, weight_R: Tensor) -> Tensor:
        """Write the gradients, times ``weight_R``, in place of those of the refused guesses."""
        grad_XV = self.grad_XV * weight_R[self.row_X][:, None]
        return grad_RV.index_copy_(0, self.row_X, grad_XV.to(grad_RV.dtype))
