"""Compute SwiGLU, and the MLP around it; both store only gate and up for the backward pass."""

# ruff: noqa: ANN001, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = 4096
"""Number of elements per program: 16 for each thread of eight warps."""
WARPS = 8


def takes_mlp(x: Tensor, *_: object) -> bool:
    """Return whether the kernels support the dtype."""
    return x.numel() > 0 and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def fused_swiglu_mlp(x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """Return down(silu(gate(x)) · up(x)); the arguments are the same as in the plain version."""
    return _SwigluMlp.apply(x.flatten(0, -2), gate_IH, up_IH, down_HI).view(*x.shape[:-1], -1)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up; the arguments are the same as in the plain version."""
    return _Swiglu.apply(gate.contiguous(), up.contiguous())


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        product = torch.empty_like(gate)
        _product[_programs(gate)](gate, up, product, gate.numel(), BLOCK, num_warps=WARPS)
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        # The gradient of gate overwrites the product that the kernel has stored, in the same program.
        arguments = gate, up, grad.contiguous(), grad_gate, grad_gate, grad_up
        _product_gradients[_programs(gate)](*arguments, gate.numel(), BLOCK, num_warps=WARPS)
        return grad_gate, grad_up


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
        gate_TI, up_TI = F.linear(x_TH, gate_IH), F.linear(x_TH, up_IH)
        product_TI = torch.empty_like(gate_TI)
        _product[_programs(gate_TI)](gate_TI, up_TI, product_TI, gate_TI.numel(), BLOCK, num_warps=WARPS)
        ctx.save_for_backward(x_TH, gate_IH, up_IH, down_HI, gate_TI, up_TI)
        return F.linear(product_TI, down_HI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, ...]:
        x_TH, gate_IH, up_IH, down_HI, gate_TI, up_TI = ctx.saved_tensors
        product_TI = torch.empty_like(gate_TI)
        # The gradient of up overwrites the product's gradient.
        grad_up_TI = grad_TH @ down_HI
        grad_gate_TI = torch.empty_like(gate_TI)
        arguments = gate_TI, up_TI, grad_up_TI, product_TI, grad_gate_TI, grad_up_TI
        _product_gradients[_programs(gate_TI)](*arguments, gate_TI.numel(), BLOCK, num_warps=WARPS)
        grad_down_HI = grad_TH.T @ product_TI
        del product_TI
        grad_x_TH = (grad_gate_TI @ gate_IH).addmm_(grad_up_TI, up_IH)
        return grad_x_TH, grad_gate_TI.T @ x_TH, grad_up_TI.T @ x_TH, grad_down_HI


def _programs(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


@triton.jit
def _product(gate, up, product, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    g = tl.load(gate + offset, mask=inside).to(tl.float32)
    u = tl.load(up + offset, mask=inside).to(tl.float32)
    tl.store(product + offset, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _product_gradients(gate, up, grad, product, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    g = tl.load(gate + offset, mask=inside).to(tl.float32)
    u = tl.load(up + offset, mask=inside).to(tl.float32)
    d = tl.load(grad + offset, mask=inside).to(tl.float32)
    share = tl.sigmoid(g)
    silu = g * share
    tl.store(product + offset, silu * u, mask=inside)
    tl.store(grad_gate + offset, d * u * (share + silu * (1 - share)), mask=inside)
    tl.store(grad_up + offset, d * silu, mask=inside)
