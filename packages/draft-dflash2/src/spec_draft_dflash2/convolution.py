"""Define the convolutions along a block's slots, before and after a sub-layer (attention or MLP).

Their taps depend on each slot's state. Shapes: A blocks, B slots, H width, K taps, G groups of channels.
Parameters are named as in the serving format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_draft_dflash2.kernels import DFlash2Kernels
    from spec_draft_dflash2.shape import CandidateShape


class BlockConvolution(nn.Module):
    """One convolution of a sub-layer's input and another of its output.

    tap = constant + linear(the sub-layer's input before any convolution), both per channel.
    """

    def __init__(self, shape: CandidateShape, kernels: DFlash2Kernels) -> None:
        """Start as the identity, so that a fresh draft computes the same as DFlash."""
        super().__init__()
        base_2KH = torch.zeros(2, shape.conv_kernel_size, shape.hidden_size)
        base_2KH[:, 0] = 1
        self.base_kernel = nn.Parameter(base_2KH)
        self.kernel_projection = nn.Linear(shape.hidden_size, shape.conv_taps, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        self._convolve = kernels.convolve

    def forward(self, x_ABH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolve the states, apply ``sublayer``, and convolve the result.

        The output of ``sublayer`` may be one rank's summand, because the last convolution is linear in it.
        """
        num_taps = self.base_kernel.shape[1]
        into_ABKG, out_ABKG = self.kernel_projection(x_ABH).unflatten(-1, (2, num_taps, -1)).unbind(-3)
        inner_ABH = sublayer(self._convolve(x_ABH, self.base_kernel[0], into_ABKG))
        return self._convolve(inner_ABH, self.base_kernel[1], out_ABKG)


class NoConvolution(nn.Module):
    """Stands for the convolutions of a draft that has none."""

    def forward(self, x_ABH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``sublayer``."""
        return sublayer(x_ABH)


def convolution(shape: CandidateShape, kernels: DFlash2Kernels) -> nn.Module:
    """Return the convolutions around a sub-layer, if the draft has convolutions."""
    return BlockConvolution(shape, kernels) if shape.conv_kernel_size else NoConvolution()
