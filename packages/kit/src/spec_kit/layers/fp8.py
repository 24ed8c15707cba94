"""Compute matrix products and the linear layers of a draft in 8-bit floating point (fp8).

Rows and weights are rounded to e4m3, gradients to e5m2, which has a larger range and less precision. Each row has a
separate scale, which maps its largest magnitude to the format's largest number. Scales are computed from the
current tensors, so a checkpoint stores none. Products are summed in float32 and returned in the dtype of their
rows. The gradients of trained weights are computed as without fp8, from the unrounded tensors.

Shapes: R rows, K inputs and N outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from spec_core import FindKernel, Kernel, KernelSet, LinearWeight, VocabularyOps
from spec_kit.drafting.decoder_shape import FP8_MULTIPLE
from spec_kit.layers.decoder_parts import Linear
from spec_kit.layers.plain_kernels import swiglu

Quantized = tuple[Tensor, Tensor]
"""Values [R, K] in fp8, and the float32 scale of each row [R, 1]: the row is values · scale."""

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def quantize_rows(rows_RK: Tensor, dtype: torch.dtype) -> Quantized:
    """Return rows rounded to the fp8 format ``dtype``; a row with infinity or NaN gets some NaN values."""
    wide_RK = rows_RK.float()
    largest = torch.finfo(dtype).max
    scale_R1 = wide_RK.abs().amax(1, keepdim=True) / largest
    scale_R1 = scale_R1.clamp(min=torch.finfo(torch.float32).tiny)
    return (wide_RK / scale_R1).clamp(-largest, largest).to(dtype), scale_R1


@dataclass(frozen=True, kw_only=True)
class Fp8Kernels(KernelSet):
    """The kernels of fp8 products."""

    quantize_rows: Callable[[Tensor, torch.dtype], Quantized] = quantize_rows
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return, for each kernel, arguments on which it is compared with its version in plain torch."""
        return {
            "quantize_rows": (draw(7, 48), FORWARD),
            "swiglu": (draw(7, 24).requires_grad_(), draw(7, 24).requires_grad_()),
        }


@dataclass(frozen=True, eq=False)
class Fp8Weight(LinearWeight):
    """A weight in fp8, with one copy for the forward and one for the backward pass, made at first use.

    The copy for the forward pass has a scale for each output, the other copy a scale for each input.
    """

    quantize: Callable[[Tensor, torch.dtype], Quantized] = quantize_rows

    @cached_property
    def _outputs(self) -> Quantized:
        return self.quantize(self.weight.detach(), FORWARD)

    @cached_property
    def _inputs(self) -> Quantized:
        return self.quantize(self.weight.detach().T.contiguous(), FORWARD)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's output [..., N] for ``rows`` [..., K], which are rounded to e4m3."""
        return self._product(rows, FORWARD, self._outputs)

    def backward(self, grad: Tensor) -> Tensor:
        """Return the gradient [..., K] of the layer's input from ``grad`` [..., N], which is rounded to e5m2."""
        return self._product(grad, BACKWARD, self._inputs)

    def take(self, index_N: Tensor) -> LinearWeight:
        """Return the weight of some of the outputs, in fp8 if their number is a multiple of 16."""
        weight = self.weight[index_N]
        return Fp8Weight(weight, self.quantize) if fits(weight) else LinearWeight(weight)

    def _product(self, rows: Tensor, dtype: torch.dtype, columns: Quantized) -> Tensor:
        values, scale = self.quantize(rows.flatten(0, -2), dtype)
        row_wise = F.ScalingType.RowWise
        scales = scale, row_wise, columns[1].T, row_wise
        product = F.scaled_mm(values, columns[0].T, *scales, output_dtype=rows.dtype)
        return product.view(*rows.shape[:-1], -1)


class Fp8Layers:
    """Computes a draft's linear layers without bias in fp8, if their sizes are multiples of 16.

    Weights are quantised once for each forward pass of the draft.
    """

    def __init__(self, find: FindKernel) -> None:
        """Use the backend's kernels that ``find`` returns."""
        self._find = find
        self._kernels = Fp8Kernels.of(find)
        self._own: dict[str, Kernel] = {
            "added_linear": self._linear,
            "linear_weight": self._weight,
            "swiglu_mlp": self._swiglu_mlp,
        }
        self._kept: dict[Tensor, Fp8Weight] = {}

    def find(self, name: str) -> Kernel | None:
        """Return the kernel called ``name``: fp8's own, or else the backend's, or None."""
        return self._own.get(name) or self._find(name)

    def attach(self, module: nn.Module) -> None:
        """Compute the linear layers of ``module``, which was built with the kernels of ``find``, in fp8."""
        for layer in module.modules():
            if isinstance(layer, Linear) and fits(layer.weight):
                layer.product = self._linear
        module.register_forward_pre_hook(self._forget)

    def _forget(self, *_: object) -> None:
        self._kept.clear()

    def _weight(self, weight: Tensor) -> Fp8Weight:
        if not fits(weight):
            return NotImplemented
        if weight not in self._kept:
            self._kept[weight] = Fp8Weight(weight, self._kernels.quantize_rows)
        return self._kept[weight]

    def _linear(self, rows: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        if not fits(weight):
            return NotImplemented
        product: Tensor = _Fp8Linear.apply(rows, weight, self._weight(weight))
        return product if added is None else product + added

    def _swiglu_mlp(self, x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
        if not fits(gate_IH):
            return NotImplemented
        hidden = self._kernels.swiglu(self._linear(x, gate_IH), self._linear(x, up_IH))
        return self._linear(hidden, down_HI)


def use_fp8_head(ops: VocabularyOps, find: FindKernel) -> None:
    """Compute products with the target's head in fp8, with the backend's kernels that ``find`` returns."""
    ops.use_head(Fp8Weight(ops.head.weight, Fp8Kernels.of(find).quantize_rows))


def fits(weight: Tensor) -> bool:
    """Return whether fp8 products support the sizes of a weight."""
    return all(size % FP8_MULTIPLE == 0 for size in weight.shape)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, products: Fp8Weight) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.products = products
        return products.forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows,) = ctx.saved_tensors
        grad_rows = ctx.products.backward(grad) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad.flatten(0, -2).T @ rows.flatten(0, -2)
        return grad_rows, grad_weight, None
