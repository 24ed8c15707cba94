"""List the Triton kernels by name. A function of each kernel checks dtypes and shapes of arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_backend_cuda.kernels.block_attention import fused_block_attention, takes_blocks
from spec_backend_cuda.kernels.convolution import fused_convolve, takes_slots
from spec_backend_cuda.kernels.fp8_rows import fused_quantize_rows, takes_rows
from spec_backend_cuda.kernels.rotary import fused_norm_rotate, fused_rotate, takes_heads
from spec_backend_cuda.kernels.swiglu_mlp import fused_swiglu, fused_swiglu_mlp, takes_mlp
from spec_backend_cuda.kernels.ttt_attention import (
    fused_ttt_attention,
    fused_ttt_attention_backward,
    takes_queries,
)
from spec_backend_cuda.kernels.vocabulary import (
    fused_distill_grad_,
    fused_distill_terms,
    fused_logsumexp_argmax,
    fused_scaled_softmax_,
    takes_logits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spec_core import Kernel


def _where(takes: Callable[..., bool], kernel: Kernel) -> Kernel:
    """Return a function that calls ``kernel``, or returns NotImplemented if ``takes`` returns False.

    NotImplemented makes the caller use plain torch.
    """

    def call(*arguments: Any) -> Any:
        return kernel(*arguments) if takes(*arguments) else NotImplemented

    return call


KERNELS: Mapping[str, Kernel] = {
    "quantize_rows": _where(takes_rows, fused_quantize_rows),
    "swiglu": _where(takes_mlp, fused_swiglu),
    "swiglu_mlp": _where(takes_mlp, fused_swiglu_mlp),
    "rotate": _where(takes_heads, fused_rotate),
    "norm_rotate": _where(lambda heads, weight, eps, angles: takes_heads(heads, angles), fused_norm_rotate),
    "ttt_attention": _where(takes_queries, fused_ttt_attention),
    "ttt_attention_backward": _where(takes_queries, fused_ttt_attention_backward),
    "block_attention": _where(takes_blocks, fused_block_attention),
    "convolve": _where(takes_slots, fused_convolve),
    "logsumexp_argmax": _where(takes_logits, fused_logsumexp_argmax),
    "distill_terms": _where(takes_logits, fused_distill_terms),
    "distill_grad_": _where(takes_logits, fused_distill_grad_),
    "scaled_softmax_": _where(takes_logits, fused_scaled_softmax_),
}
