"""Kernels in Triton; each falls back on plain torch for dtypes and shapes that it is not written for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_backend_cuda.kernels import gated_mlp, rotary, vocabulary
from spec_backend_cuda.kernels.block_attention import FusedBlocks
from spec_backend_cuda.kernels.diagonals import FusedDiagonals
from spec_core.plain_kernels import PlainKernels

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.kernels import BlockAttention, DiagonalAttention, Law


class TritonKernels(PlainKernels):
    """See ``spec_core.kernels``."""

    diagonals: DiagonalAttention | None = FusedDiagonals()
    blocks: BlockAttention | None = FusedBlocks()

    def mlp(self, x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
        chosen = gated_mlp.mlp if gated_mlp.takes(x) else super().mlp
        return chosen(x, gate_IH, up_IH, down_HI)

    def rotate(self, heads_TND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        chosen = rotary.rotate if rotary.takes(heads_TND, angles) else super().rotate
        return chosen(heads_TND, angles)

    def norm_rotate(
        self, heads_TND: Tensor, weight_D: Tensor, eps: float, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        chosen = rotary.norm_rotate if rotary.takes(heads_TND, angles) else super().norm_rotate
        return chosen(heads_TND, weight_D, eps, angles)

    def summarize(self, logits_XV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = vocabulary.summarize if vocabulary.takes(logits_XV) else super().summarize
        return chosen(logits_XV)

    def compare(
        self, logits_RSV: Tensor, log_sum_RS: Tensor, teacher: Law, mass_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        chosen = vocabulary.compare if vocabulary.takes(logits_RSV) else super().compare
        return chosen(logits_RSV, log_sum_RS, teacher, mass_R)

    def gradient_(
        self,
        logits_RSV: Tensor,
        log_sum_RS: Tensor,
        factors: tuple[Tensor, Tensor, Tensor],
        teacher: Law,
        mass_R: Tensor,
    ) -> Tensor:
        chosen = vocabulary.gradient_ if vocabulary.takes(logits_RSV) else super().gradient_
        return chosen(logits_RSV, log_sum_RS, factors, teacher, mass_R)

    def scaled_softmax_(self, logits_XV: Tensor, log_sum_X: Tensor, factor_X: Tensor) -> Tensor:
        chosen = vocabulary.scaled_softmax_ if vocabulary.takes(logits_XV) else super().scaled_softmax_
        return chosen(logits_XV, log_sum_X, factor_X)
