"""The kernels that DFlash can use, and plain versions of those that are its own (see ``spec_core.kernels``).

Shapes: T tokens, N heads, K key-value heads, D head_dim; X any rows, V the local rows of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from spec_draft_dflash.attention import BlockLayout, block_attention
from spec_kit.drafting import DecoderKernels, rotate, softmax

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from spec_draft_dflash.attention import KeysValues

    Angles = tuple[Tensor, Tensor]


def norm_rotate(heads_TND: Tensor, weight_D: Tensor, eps: float, angles: Angles) -> Tensor:
    """Return the RMS norm of each head, rotated by ``angles`` (cos and sin [T, 1, rotated / 2]); differentiable."""
    return rotate(F.rms_norm(heads_TND, weight_D.shape, weight_D, eps), angles)


def scaled_softmax_(logits_XV: Tensor, log_sum_X: Tensor, factor_X: Tensor) -> Tensor:
    """Overwrite the logits by factor · softmax; ``log_sum_X`` is their log-sum-exp over all shards."""
    return logits_XV.copy_(softmax(logits_XV, log_sum_X).mul_(factor_X[..., None]))


@dataclass(frozen=True, kw_only=True)
class DFlashKernels(DecoderKernels):
    """The kernels that DFlash can use."""

    norm_rotate: Callable[[Tensor, Tensor, float, Angles], Tensor] = norm_rotate
    scaled_softmax_: Callable[[Tensor, Tensor, Tensor], Tensor] = scaled_softmax_
    block_attention: Callable[[Tensor, KeysValues, KeysValues, BlockLayout, int | None], Tensor] = (
        block_attention
    )

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return arguments to compare each kernel with its plain version on."""
        angle, logits_XV = draw(7, 1, 16), draw(5, 33)
        layout = BlockLayout(torch.tensor([1, 3, 9]), torch.tensor([0, 0, 5]), angle.device)
        context, own = ([draw(*shape, 2, 32).requires_grad_() for _ in range(2)] for shape in ((10,), (3, 4)))
        queries = draw(3, 4, 4, 32).requires_grad_()
        return {
            **super().examples(draw),
            "norm_rotate": (
                draw(7, 3, 32).requires_grad_(),
                draw(32).requires_grad_(),
                1e-5,
                (angle.cos(), angle.sin()),
            ),
            "scaled_softmax_": (logits_XV, logits_XV.logsumexp(-1), draw(5)),
            "block_attention": (queries, tuple(context), tuple(own), layout, 6),
        }
