"""Define the kernels that DFlash2 can use, and a plain torch version of ``convolve`` (see ``spec_core.kernels``).

Shapes: A blocks, B slots, H width, K taps, G groups of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kit.block_drafting import BlockKernels


def convolve(x_ABH: Tensor, base_KH: Tensor, moving_ABKG: Tensor) -> Tensor:
    """Return y_b = Σ_k (base_k + moving_bk) ⊙ x_(b − k) for each slot b of a block; differentiable.

    x is 0 before the first slot. A group's channels share the number in ``moving_ABKG``.
    """
    groups = (moving_ABKG.shape[-1], -1)
    num_slots = x_ABH.shape[1]
    x_ABGC, base_KGC = x_ABH.unflatten(-1, groups), base_KH.unflatten(-1, groups)
    total_ABGC = torch.zeros_like(x_ABGC)
    for tap in range(min(len(base_KH), num_slots)):
        before_ABGC = F.pad(x_ABGC[:, : num_slots - tap], (0, 0, 0, 0, tap, 0))
        total_ABGC = total_ABGC + (base_KGC[tap] + moving_ABKG[:, :, tap, :, None]) * before_ABGC
    return total_ABGC.flatten(-2)


@dataclass(frozen=True, kw_only=True)
class DFlash2Kernels(BlockKernels):
    """The kernels that DFlash2 can use: the backbone's kernels, and the convolution of a block's slots."""

    convolve: Callable[[Tensor, Tensor, Tensor], Tensor] = convolve

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return example arguments for comparing each kernel with its plain version."""
        shapes = (5, 3, 24), (2, 24), (5, 3, 2, 6)
        return {
            **super().examples(draw),
            "convolve": tuple(draw(*shape).requires_grad_() for shape in shapes),
        }
