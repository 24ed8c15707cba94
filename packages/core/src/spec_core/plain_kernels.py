"""Kernels in plain torch: what runs where a backend has nothing faster, and what a backend's must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from spec_core.kernels import Kernels
from spec_core.rope import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.kernels import BlockAttention, DiagonalAttention, Law


class PlainKernels(Kernels):
    """See ``spec_core.kernels``."""

    diagonals: DiagonalAttention | None = None
    blocks: BlockAttention | None = None

    def mlp(self, x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate_IH)) * F.linear(x, up_IH), down_HI)

    def rotate(self, heads_TND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(heads_TND, angles)

    def norm_rotate(
        self, heads_TND: Tensor, weight_D: Tensor, eps: float, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        return rotate(F.rms_norm(heads_TND, weight_D.shape, weight_D, eps), angles)

    def summarize(self, logits_XV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = _wide(logits_XV)
        top_X, index_X = wide.max(-1)
        return top_X, (wide - top_X[..., None]).exp_().sum(-1), index_X

    def compare(
        self, logits_RSV: Tensor, log_sum_RS: Tensor, teacher: Law, mass_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _wide(logits_RSV)
        law_RV = _softmax(*teacher)
        aligned_RS = torch.matmul(wide, law_RV[..., None]).squeeze(-1)
        full_R1V = (law_RV * mass_R[:, None])[:, None]
        own_RSV = _softmax(wide, log_sum_RS)
        overlap_RS = torch.minimum(own_RSV, full_R1V).sum(-1)
        below_RS = own_RSV.mul_(own_RSV < full_R1V).sum(-1)
        return aligned_RS, overlap_RS, below_RS

    def gradient_(
        self,
        logits_RSV: Tensor,
        log_sum_RS: Tensor,
        factors: tuple[Tensor, Tensor, Tensor],
        teacher: Law,
        mass_R: Tensor,
    ) -> Tensor:
        all_RS, below_RS, law_RS = (factor[..., None] for factor in factors)
        own_RSV, law_R1V = _softmax(_wide(logits_RSV), log_sum_RS), _softmax(*teacher)[:, None]
        share_RSV = torch.where(own_RSV < law_R1V * mass_R[:, None, None], all_RS + below_RS, all_RS)
        return logits_RSV.copy_(own_RSV.mul_(share_RSV).sub_(law_R1V * law_RS))

    def scaled_softmax_(self, logits_XV: Tensor, log_sum_X: Tensor, factor_X: Tensor) -> Tensor:
        law_XV = _softmax(_wide(logits_XV), log_sum_X)
        return logits_XV.copy_(law_XV.mul_(factor_X[..., None]))


PLAIN = PlainKernels()


def _wide(logits: Tensor) -> Tensor:
    """Float32 or wider: the softmax of a bf16 product loses the small probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _softmax(logits: Tensor, log_sum: Tensor) -> Tensor:
    return (_wide(logits) - log_sum[..., None]).exp_()
