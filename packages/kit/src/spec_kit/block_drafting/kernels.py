"""Define the kernels of drafts that guess blocks, in plain torch (see ``spec_core.kernels``).

Shapes: T tokens, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_kit.block_drafting.attention import BlockLayout, KeysValues, block_attention
from spec_kit.layers import DecoderKernels, rotate
from spec_kit.layers.plain_kernels import rms_norm

Angles = tuple[Tensor, Tensor]


def norm_rotate(heads_TND: Tensor, weight_D: Tensor, eps: float, angles: Angles) -> Tensor:
    """Return each head's RMS norm, rotated by ``angles`` (cos, sin: [T, 1, rotated / 2]); differentiable."""
    return rotate(rms_norm(heads_TND, weight_D, eps), angles)


@dataclass(frozen=True, kw_only=True)
class BlockKernels(DecoderKernels):
    """The kernels that a backbone of blocks can use; a draft's subclass adds further kernels."""

    norm_rotate: Callable[[Tensor, Tensor, float, Angles], Tensor] = norm_rotate
    block_attention: Callable[[Tensor, KeysValues, KeysValues, BlockLayout, int | None, bool], Tensor] = (
        block_attention
    )

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return, for each kernel, arguments on which it is compared with its version in plain torch."""
        angle = draw(7, 1, 16)
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
            "block_attention": (queries, tuple(context), tuple(own), layout, 6, True),
        }
