"""The kernels for CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor


def medusa_residual(x: Tensor, y: Tensor) -> Tensor:
    """Add in the place of silu's result: one tensor fewer than in the plain version."""
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return NotImplemented
    return F.silu(y).add_(x)
