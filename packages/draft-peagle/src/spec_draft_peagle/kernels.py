"""Define the kernels that P-EAGLE can use (see ``spec_core.kernels``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_kit.block_drafting import BlockLayout, KeysValues, block_attention
from spec_kit.layers import DecoderKernels, rotate


@dataclass(frozen=True, kw_only=True)
class PEagleKernels(DecoderKernels):
    """The kernels that P-EAGLE can use: the decoder kernels, and block attention for its chains."""

    rotate: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = rotate
    block_attention: Callable[[Tensor, KeysValues, KeysValues, BlockLayout, int | None, bool], Tensor] = (
        block_attention
    )
    prefixed_attention: Callable[..., tuple[Tensor, Tensor]] | None = None
    """See ``spec_kit.chain_drafting.ChainKernels``, also for the backward pass."""
    prefixed_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return example arguments for comparing each kernel with its plain version."""
        angle = draw(7, 1, 16)
        layout = BlockLayout(torch.tensor([1, 3, 9]), torch.tensor([0, 0, 5]), angle.device)
        context, own = ([draw(*shape, 2, 32).requires_grad_() for _ in range(2)] for shape in ((10,), (3, 4)))
        return {
            **super().examples(draw),
            "rotate": (draw(7, 3, 32).requires_grad_(), (angle.cos(), angle.sin())),
            "block_attention": (
                draw(3, 4, 4, 32).requires_grad_(),
                tuple(context),
                tuple(own),
                layout,
                None,
                True,
            ),
        }
