"""Define the kernels of Llama-style drafts in plain torch (see ``spec_core.kernels``).

Shapes: H width, I intermediate width; R positions, S rows of the draft's logits for each position, X any number of
rows, V the local rows of the vocabulary. Kernels return sums over the local rows of the vocabulary; the caller
combines shards by ``ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_core import KernelSet, LinearWeight

Distribution = tuple[Tensor, Tensor]
"""Logits [R, V] and their log-sum-exp [R] over all shards: softmax = exp(logits − log-sum-exp)."""
Three = tuple[Tensor, Tensor, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of the last dimension, times ``weight``; differentiable."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, element by element; differentiable."""
    return F.silu(gate) * up


def swiglu_mlp(x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """Return down(silu(gate(x)) · up(x)), with the shape of ``x`` [..., H]; differentiable."""
    return F.linear(swiglu(F.linear(x, gate_IH), F.linear(x, up_IH)), down_HI)


def logsumexp_argmax(logits_XV: Tensor) -> Three:
    """Return each row's largest logit, Σ exp(logit − largest), and the index of the largest logit.

    Logit and sum are float32 or wider. A row with a NaN has NaN as its sum, and any index inside the row.
    """
    wide = upcast(logits_XV)
    top_X, index_X = wide.max(-1)
    return top_X, (wide - top_X[..., None]).exp_().sum(-1), index_X


def distill_terms(logits_RSV: Tensor, log_sum_RS: Tensor, teacher: Distribution, mass_R: Tensor) -> Three:
    """Return Σ p · logit, Σ min(mass · p, q), and Σ q over tokens with q < mass · p, each [R, S].

    The sums run over the local rows of the vocabulary. q: softmax of ``logits_RSV``; p: the teacher's softmax
    over the draft's vocabulary; mass: the draft vocabulary's share of the teacher's whole distribution.
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
    """Overwrite the logits by a · q + b · (q if q < mass · p, else 0) − c · p for the factors a, b, c [R, S].

    q: softmax of the logits; p and mass: see ``distill_terms``. All losses of ``row_loss`` have gradients of
    this form.
    """
    all_RS, below_RS, teacher_RS = (factor[..., None] for factor in factors)
    own_RSV = softmax(logits_RSV, log_sum_RS)
    teacher_R1V = softmax(*teacher)[:, None]
    share_RSV = torch.where(own_RSV < teacher_R1V * mass_R[:, None, None], all_RS + below_RS, all_RS)
    return logits_RSV.copy_(own_RSV.mul_(share_RSV).sub_(teacher_R1V * teacher_RS))


def upcast(logits: Tensor) -> Tensor:
    """Return the logits in float32 or wider, because a softmax in bfloat16 loses small probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def softmax(logits: Tensor, log_sum: Tensor) -> Tensor:
    """Return the softmax of rows [..., V], float32 or wider. ``log_sum``: log-sum-exp over all shards."""
    return (upcast(logits) - log_sum[..., None]).exp_()


class RmsNorm(nn.RMSNorm):
    """An RMS norm. ``norm(x, weight, eps)`` computes it, and may be replaced."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = staticmethod(rms_norm)

    def __init__(self, width: int, eps: float) -> None:
        """Start with weight 1."""
        super().__init__(width, eps)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed channels, shaped like ``x`` [..., width]."""
        return self.norm(x, self.weight, self._eps)


@dataclass(frozen=True, kw_only=True)
class DecoderKernels(KernelSet):
    """The kernels of a draft with a SwiGLU MLP and a loss over the vocabulary; subclasses add others."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    swiglu_mlp: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = swiglu_mlp
    linear_weight: Callable[[Tensor], LinearWeight] = LinearWeight
    """(weight) -> the LinearWeight that computes the weight's products in one forward and backward pass."""
    logsumexp_argmax: Callable[[Tensor], Three] = logsumexp_argmax
    distill_terms: Callable[[Tensor, Tensor, Distribution, Tensor], Three] = distill_terms
    distill_grad_: Callable[[Tensor, Tensor, Three, Distribution, Tensor], Tensor] = distill_grad_

    def attach(self, module: nn.Module) -> None:
        """Let the kernel ``rms_norm`` compute the norms of a new module."""
        for norm in module.modules():
            if isinstance(norm, RmsNorm):
                norm.norm = self.rms_norm

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return, for each kernel, arguments on which it is compared with its version in plain torch."""
        logits_RSV = draw(5, 2, 33)
        teacher_RV = draw(5, 33)
        mass_R = draw(5).sigmoid()
        log_sum_RS = logits_RSV.logsumexp(-1)
        factors = (draw(5, 2), draw(5, 2), draw(5, 2))
        teacher = teacher_RV, teacher_RV.logsumexp(-1)
        shapes = (7, 16), (24, 16), (24, 16), (16, 24)
        return {
            "rms_norm": (draw(7, 3, 16).requires_grad_(), draw(16).requires_grad_(), 1e-5),
            "swiglu_mlp": tuple(draw(*shape).requires_grad_() for shape in shapes),
            "linear_weight": (draw(24, 16),),
            "logsumexp_argmax": (logits_RSV,),
            "distill_terms": (logits_RSV, log_sum_RS, teacher, mass_R),
            "distill_grad_": (logits_RSV, log_sum_RS, factors, teacher, mass_R),
        }
