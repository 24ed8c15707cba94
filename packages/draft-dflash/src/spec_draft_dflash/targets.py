"""The targets of slots, tokens or the target's distributions, with their share of a cross-entropy and its gradient.

Cross-entropy is log-sum-exp of the logits − ``aligned``. Shapes: R counted slots, V local rows of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_kit.drafting import sharded_logsumexp_argmax

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_draft_dflash.kernels import DFlashKernels
    from spec_kit.drafting import Distribution


@dataclass(frozen=True)
class HardTargets:
    """Tokens of the data as targets."""

    column_R1: Tensor
    """int64: the label among the local rows; any of them where it is on another shard."""
    here_R1: Tensor
    """bool: the label is on this shard."""
    kernels: DFlashKernels

    @classmethod
    def of(cls, id_R: Tensor, ops: VocabularyOps, kernels: DFlashKernels) -> Self:
        """Return the targets ``id_R`` in terms of the local shard."""
        first, stop = ops.vocab_range
        here_R = (id_R >= first) & (id_R < stop)
        column_R = (id_R - first).clamp(0, stop - first - 1)
        return cls(column_R[:, None], here_R[:, None], kernels)

    def aligned(self, logits_RV: Tensor, log_sum_R: Tensor) -> Tensor:
        """Return the label's logit [R], the local share."""
        return (logits_RV.gather(1, self.column_R1).to(log_sum_R.dtype) * self.here_R1).squeeze(1)

    def gradient_(self, logits_RV: Tensor, log_sum_R: Tensor, weight_R: Tensor) -> Tensor:
        """Overwrite the logits by weight · (softmax − label); at the label's column it is rounded once."""
        prob_R1 = (logits_RV.gather(1, self.column_R1).to(log_sum_R.dtype) - log_sum_R[:, None]).exp()
        there_R1 = ((prob_R1 - self.here_R1.to(prob_R1.dtype)) * weight_R[:, None]).to(logits_RV.dtype)
        self.kernels.scaled_softmax_(logits_RV, log_sum_R, weight_R)
        return logits_RV.scatter_(1, self.column_R1, there_R1)


@dataclass(frozen=True)
class SoftTargets:
    """The target's distributions as targets."""

    distribution: Distribution
    kernels: DFlashKernels

    @classmethod
    def of(cls, logits_RV: Tensor, ops: VocabularyOps, kernels: DFlashKernels) -> Self:
        """Return the distributions of the target's logits."""
        ids_V = torch.arange(*ops.vocab_range, device=logits_RV.device)
        log_sum_R, _ = sharded_logsumexp_argmax(logits_RV, ids_V, ops, kernels)
        return cls((logits_RV, log_sum_R), kernels)

    def aligned(self, logits_RV: Tensor, log_sum_R: Tensor) -> Tensor:
        """Return Σ p · logit [R], the local share; p: the target's distribution."""
        one_R = torch.ones_like(log_sum_R)
        terms = self.kernels.distill_terms(logits_RV[:, None], log_sum_R[:, None], self.distribution, one_R)
        return terms[0].squeeze(1)

    def gradient_(self, logits_RV: Tensor, log_sum_R: Tensor, weight_R: Tensor) -> Tensor:
        """Overwrite the logits by weight · (softmax − p); p: the target's distribution."""
        weight_R1, one_R = weight_R[:, None], torch.ones_like(log_sum_R)
        factors = weight_R1, torch.zeros_like(weight_R1), weight_R1
        self.kernels.distill_grad_(logits_RV[:, None], log_sum_R[:, None], factors, self.distribution, one_R)
        return logits_RV
