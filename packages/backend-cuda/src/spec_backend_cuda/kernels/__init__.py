"""Kernels in Triton, by the names that drafts ask for; each says which dtypes and shapes it is written for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_backend_cuda.kernels import gated_mlp, rotary, vocabulary
from spec_backend_cuda.kernels.block_attention import FusedBlocks
from spec_backend_cuda.kernels.diagonals import FusedDiagonals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from spec_core import Kernel

_BLOCKS, _OWN_KEYS = FusedBlocks(), FusedDiagonals()


def _where(takes: Callable[..., bool], kernel: Kernel) -> Kernel:
    """The kernel where ``takes`` says so of its arguments; elsewhere NotImplemented, and plain torch runs."""

    def call(*arguments: Any) -> Any:
        return kernel(*arguments) if takes(*arguments) else NotImplemented

    return call


def _block_attention(q: Tensor, context: Any, own: Any, layout: Any, window: int | None) -> Tensor:
    return _BLOCKS(q, context, own, layout.places, window)


KERNELS: Mapping[str, Kernel] = {
    "swiglu_mlp": _where(lambda x, *_: gated_mlp.takes(x), gated_mlp.mlp),
    "rotate": _where(rotary.takes, rotary.rotate),
    "norm_rotate": _where(lambda heads, weight, eps, angles: rotary.takes(heads, angles), rotary.norm_rotate),
    "ttt_attention": _where(lambda q, *_: _OWN_KEYS.takes(q), _OWN_KEYS.merge),
    "ttt_attention_backward": _where(lambda grad, *_: _OWN_KEYS.takes(grad), _OWN_KEYS.backward),
    "block_attention": _where(lambda q, context, *_: _BLOCKS.takes(q, context[0].shape[1]), _block_attention),
    "logsumexp_argmax": _where(vocabulary.takes, vocabulary.summarize),
    "distill_terms": _where(lambda logits, *_: vocabulary.takes(logits), vocabulary.compare),
    "distill_grad_": _where(lambda logits, *_: vocabulary.takes(logits), vocabulary.gradient_),
    "scaled_softmax_": _where(lambda logits, *_: vocabulary.takes(logits), vocabulary.scaled_softmax_),
}
