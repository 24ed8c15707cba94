"""A computation of Medusa in plain torch, and a faster kernel for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional as F

from spec_core import Kernel, KernelSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


def medusa_residual(x: Tensor, y: Tensor) -> Tensor:
    """Return x + silu(y), of equal shapes."""
    return x + F.silu(y)


@dataclass(frozen=True, kw_only=True)
class MedusaKernels(KernelSet):
    """A field's name is the kernel's, its default the plain version."""

    medusa_residual: Kernel = medusa_residual

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return arguments on which each kernel is compared with its plain version."""
        return {"medusa_residual": (draw(3, 4).requires_grad_(), draw(3, 4).requires_grad_())}
