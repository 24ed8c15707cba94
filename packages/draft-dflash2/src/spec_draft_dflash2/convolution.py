"""Define the convolutions along a block's slots, before and after a sub-layer (attention or MLP).

Their taps depend on each slot's state. Shapes: A blocks, B slots, H width, K taps, G groups of channels.
Parameters are named as in the serving format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_draft_dflash2.shape import DFlash2Shape


class BlockConvolution(nn.Module):
    """One convolution of a sub-layer's input and another of its output.

    Taps are the sum of a constant and a part computed from the sub-layer's input before any convolution.
    """

    def __init__(self, shape: DFlash2Shape) -> None:
        """Start as the identity, so that a fresh draft computes the same as DFlash."""
        super().__init__()
        base_2KH = torch.zeros(2, shape.conv_kernel_size, shape.hidden_size)
        base_2KH[:, 0] = 1
        self.base_kernel = nn.Parameter(base_2KH)
        self.kernel_projection = nn.Linear(shape.hidden_size, shape.conv_taps, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x_ABH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolve the states, apply ``sublayer``, and convolve the result.

        The output of ``sublayer`` may be one rank's summand, because the last convolution is linear in it.
        """
        num_taps = self.base_kernel.shape[1]
        into_ABKG, out_ABKG = self.kernel_projection(x_ABH).unflatten(-1, (2, num_taps, -1)).unbind(-3)
        inner_ABH = sublayer(convolve(x_ABH, self.base_kernel[0], into_ABKG))
        return convolve(inner_ABH, self.base_kernel[1], out_ABKG)


def convolve(x_ABH: Tensor, base_KH: Tensor, moving_ABKG: Tensor) -> Tensor:
    """Return y_b = Σ_k (base_k + moving_bk) ⊙ x_(b − k) for each slot b of a block.

    x is 0 before the first slot.
    """
    groups, num_slots = (moving_ABKG.shape[-1], -1), x_ABH.shape[1]
    x_ABGC, base_KGC = x_ABH.unflatten(-1, groups), base_KH.unflatten(-1, groups)
    total_ABGC = torch.zeros_like(x_ABGC)
    for tap in range(min(len(base_KH), num_slots)):
        before_ABGC = F.pad(x_ABGC[:, : num_slots - tap], (0, 0, 0, 0, tap, 0))
        total_ABGC = total_ABGC + (base_KGC[tap] + moving_ABKG[:, :, tap, :, None]) * before_ABGC
    return total_ABGC.flatten(-2)
