"""A scalar whose gradients were computed along with it, so that no graph of its computation is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def with_gradients(value: Tensor, grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """``value`` [] as a function of ``inputs``, whose derivatives are ``grads``."""
    result: Tensor = _KnownGradients.apply(value, tuple(grads), *inputs)
    return result


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*grads)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *((grad * grad_value).to(dtype) for grad, dtype in pairs)
