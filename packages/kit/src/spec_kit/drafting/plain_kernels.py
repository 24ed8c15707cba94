"""Kernels that both chains and blocks of a Llama-style draft can use, in plain torch (see ``spec_core.kernels``).

Shapes: H width, I intermediate width; R positions, S rows of a draft for each, X any rows, V the local rows of the
vocabulary. Reductions over the vocabulary stay outside: kernels return sums over local rows, ``ops`` combines shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core.kernels import KernelSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Distribution = tuple[Tensor, Tensor]
"""Logits [R, V] and their log-sum-exp [R] over all shards: softmax = exp(logits − log-sum-exp)."""
Three = tuple[Tensor, Tensor, Tensor]


def swiglu_mlp(x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """Return down(silu(gate(x)) · up(x)), like ``x`` [..., H]; differentiable."""
    return F.linear(F.silu(F.linear(x, gate_IH)) * F.linear(x, up_IH), down_HI)


def logsumexp_argmax(logits_XV: Tensor) -> Three:
    """Return each row's largest logit, Σ exp(logit − largest), both float32 or wider, and the largest's index.

    A row that holds a NaN has a NaN for a sum, and any index inside the row.
    """
    wide = upcast(logits_XV)
    top_X, index_X = wide.max(-1)
    return top_X, (wide - top_X[..., None]).exp_().sum(-1), index_X


def distill_terms(logits_RSV: Tensor, log_sum_RS: Tensor, teacher: Distribution, mass_R: Tensor) -> Three:
    """Return Σ p · logit, Σ min(mass · p, q) and Σ q where q < mass · p, all [R, S], of the local rows.

    q is the rows' softmax, p the teacher's.
    """
    wide = upcast(logits_RSV)
    teacher_RV = softmax(*teacher)
    aligned_RS = torch.matmul(wide, teacher_RV[..., None]).squeeze(-1)
    full_R1V = (teacher_RV * mass_R[:, None])[:, None]
    own_RSV = softmax(wide, log_sum_RS)
    overlap_RS = torch.minimum(own_RSV, full_R1V).sum(-1)
    below_RS = own_RSV.mul_(own_RSV < full_R1V).sum(-1)
    return aligned_RS, overlap_RS, below_RS


def distill_grad_(
    logits_RSV: Tensor, log_sum_RS: Tensor, factors: Three, teacher: Distribution, mass_R: Tensor
) -> Tensor:
    """Overwrite the logits by a · q + b · (q where q < mass · p) − c · p for the factors a, b, c [R, S].

    Every loss against the teacher's distribution has a gradient of this form; no distribution is ever stored.
    """
    all_RS, below_RS, teacher_RS = (factor[..., None] for factor in factors)
    own_RSV, teacher_R1V = softmax(logits_RSV, log_sum_RS), softmax(*teacher)[:, None]
    share_RSV = torch.where(own_RSV < teacher_R1V * mass_R[:, None, None], all_RS + below_RS, all_RS)
    return logits_RSV.copy_(own_RSV.mul_(share_RSV).sub_(teacher_R1V * teacher_RS))


def upcast(logits: Tensor) -> Tensor:
    """Return the logits in float32 or wider: the softmax of a bf16 product loses the small probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def softmax(logits: Tensor, log_sum: Tensor) -> Tensor:
    """Return the softmax of rows [..., V] whose log-sum-exp over all shards is known, float32 or wider."""
    return (upcast(logits) - log_sum[..., None]).exp_()


@dataclass(frozen=True, kw_only=True)
class DecoderKernels(KernelSet):
    """The kernels that a draft with a SwiGLU MLP and a loss over the vocabulary can use; drafts add their own."""

    swiglu_mlp: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = swiglu_mlp
    logsumexp_argmax: Callable[[Tensor], Three] = logsumexp_argmax
    distill_terms: Callable[[Tensor, Tensor, Distribution, Tensor], Three] = distill_terms
    distill_grad_: Callable[[Tensor, Tensor, Three, Distribution, Tensor], Tensor] = distill_grad_

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return arguments to compare each kernel with its plain version on."""
        logits_RSV, teacher_RV, mass_R = draw(5, 2, 33), draw(5, 33), draw(5).sigmoid()
        log_sum_RS, factors = logits_RSV.logsumexp(-1), (draw(5, 2), draw(5, 2), draw(5, 2))
        teacher = teacher_RV, teacher_RV.logsumexp(-1)
        shapes = (7, 16), (24, 16), (24, 16), (16, 24)
        return {
            "swiglu_mlp": tuple(draw(*shape).requires_grad_() for shape in shapes),
            "logsumexp_argmax": (logits_RSV,),
            "distill_terms": (logits_RSV, log_sum_RS, teacher, mass_R),
            "distill_grad_": (logits_RSV, log_sum_RS, factors, teacher, mass_R),
        }
