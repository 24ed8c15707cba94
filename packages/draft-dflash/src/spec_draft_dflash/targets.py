"""The targets of slots, tokens or the target's distributions, with their share of a cross-entropy and its gradient.

Cross-entropy is log-sum-exp of the logits − ``aligned``. Shapes: R counted slots, V local rows of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_kit.drafting import LabelColumns, sharded_logsumexp_argmax

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_draft_dflash.kernels import DFlashKernels
    from spec_kit.drafting import Distribution


@dataclass(frozen=True)
class HardTargets:
    """Tokens of the data as targets."""

    labels: LabelColumns
    kernels: DFlashKernels

    @classmethod
    def of(cls, id_R: Tensor, ops: VocabularyOps, kernels: DFlashKernels) -> Self:
        """Return the targets ``id_R`` in terms of the local shard."""
        return cls(LabelColumns.of(id_R, ops), kernels)

    def aligned(self, logits_RV: Tensor, log_sum_R: Tensor) -> Tensor:
        """Return the label's logit [R], the local share."""
        return self.labels.logits(logits_RV, log_sum_R.dtype)

    def gradient_(self, logits_RV: Tensor, log_sum_R: Tensor, weight_R: Tensor) -> Tensor:
        """Overwrite the logits by weight · (softmax − label); at the label's column it is rounded once."""
        column_R1, here_R1 = self.labels.column_R1, self.labels.here_R1
        prob_R1 = (logits_RV.gather(1, column_R1).to(log_sum_R.dtype) - log_sum_R[:, None]).exp()
        there_R1 = ((prob_R1 - here_R1.to(prob_R1.dtype)) * weight_R[:, None]).to(logits_RV.dtype)
        self.kernels.scaled_softmax_(logits_RV, log_sum_R, weight_R)
        return logits_RV.scatter_(1, column_R1, there_R1)


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
