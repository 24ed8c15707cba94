"""Convolve the slots of blocks with taps that depend on the slot (kernel ``convolve``).

A row is one slot of one block. A Triton program handles ROWS rows and CHANNELS channels. The forward pass reads
and writes the states once. The backward pass computes the three gradients in one pass over the states.
"""

# ruff: noqa: ANN001, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 32
CHANNELS = 128
"""Smallest number of channels of a program. A group of channels is never divided."""
LARGEST_GROUP = 1024


def takes_slots(x_ABH: Tensor, base_KH: Tensor, moving_ABKG: Tensor) -> bool:
    """Return whether the kernels support the dtype, and the size of a group of channels."""
    group = x_ABH.shape[-1] // moving_ABKG.shape[-1]
    return (
        x_ABH.numel() > 0
        and x_ABH.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and triton.next_power_of_2(group) == group <= LARGEST_GROUP
    )


def fused_convolve(x_ABH: Tensor, base_KH: Tensor, moving_ABKG: Tensor) -> Tensor:
    """Return the convolved states; the arguments are the same as in the plain version."""
    return _Convolution.apply(x_ABH, base_KH, moving_ABKG)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ABH: Tensor, base_KH: Tensor, moving_ABKG: Tensor) -> Tensor:
        x_ABH, base_KH = x_ABH.contiguous(), base_KH.contiguous()
        if moving_ABKG.stride(-1) != 1:
            moving_ABKG = moving_ABKG.contiguous()
        out = torch.empty_like(x_ABH)
        grid, shape = _launch(x_ABH, moving_ABKG)
        _convolve_rows[grid](x_ABH, base_KH, moving_ABKG, out, *moving_ABKG.stride()[:3], **shape)
        ctx.save_for_backward(x_ABH, base_KH, moving_ABKG)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ABH: Tensor) -> tuple[Tensor, ...]:
        x_ABH, base_KH, moving_ABKG = ctx.saved_tensors
        grid, shape = _launch(x_ABH, moving_ABKG)
        grad_x = torch.empty_like(x_ABH)
        grad_moving = moving_ABKG.new_empty(moving_ABKG.shape)
        # Programs store their summands, which are added in a fixed order.
        shares = base_KH.new_empty(grid[0], *base_KH.shape, dtype=torch.float32)
        inputs = (grad_ABH.contiguous(), x_ABH, base_KH, moving_ABKG)
        grads = (grad_x, grad_moving, shares)
        _convolution_gradients[grid](*inputs, *grads, *moving_ABKG.stride()[:3], **shape)
        return grad_x, shares.sum(0).to(base_KH.dtype), grad_moving


def _launch(x_ABH: Tensor, moving_ABKG: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    blocks, slots, width = x_ABH.shape
    taps, groups = moving_ABKG.shape[2:]
    channels = max(CHANNELS, width // groups)
    shape = {"num_rows": blocks * slots, "slots": slots, "width": width}
    constants = {"TAPS": taps, "GROUP": width // groups, "ROWS": ROWS, "CHANNELS": channels}
    return (triton.cdiv(blocks * slots, ROWS), triton.cdiv(width, channels)), shape | constants


@triton.jit
def _tile(num_rows, slots, width, ROWS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr):
    """Return a tile's rows, groups, channels, blocks and slots, which elements exist, and their indices.

    A tile is [rows, groups, channels of a group], so that one load of a tap serves a group.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    group = tl.program_id(1) * (CHANNELS // GROUP) + tl.arange(0, CHANNELS // GROUP)[None, :, None]
    channel = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = (row < num_rows) & (channel < width)
    return row, group, channel, row // slots, row % slots, inside, row.to(tl.int64) * width + channel


@triton.jit(do_not_specialize=["num_rows"])
def _convolve_rows(
    x, base, moving, out, block_stride, slot_stride, tap_stride, num_rows, slots, width,
    TAPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row, group, channel, block, slot, inside, element = _tile(num_rows, slots, width, ROWS, CHANNELS, GROUP)
    exists = (row < num_rows) & (group * GROUP < width)
    tap = moving + block.to(tl.int64) * block_stride + slot * slot_stride + group
    total = tl.zeros((ROWS, CHANNELS // GROUP, GROUP), tl.float32)
    for back in tl.static_range(TAPS):
        before = tl.load(x + element - back * width, mask=inside & (slot >= back), other=0.0)
        constant = tl.load(base + back * width + channel, mask=channel < width, other=0.0)
        factor = tl.load(tap + back * tap_stride, mask=exists, other=0.0)
        total += (constant.to(tl.float32) + factor.to(tl.float32)) * before.to(tl.float32)
    tl.store(out + element, total, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _convolution_gradients(
    grad, x, base, moving, grad_x, grad_moving, shares, block_stride, slot_stride, tap_stride, num_rows, slots, width,
    TAPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row, group, channel, block, slot, inside, element = _tile(num_rows, slots, width, ROWS, CHANNELS, GROUP)
    exists = (row < num_rows) & (group * GROUP < width)
    own = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32)
    tap = moving + block.to(tl.int64) * block_stride + slot * slot_stride + group
    grad_tap = grad_moving + row.to(tl.int64) * TAPS * (width // GROUP) + group
    share = shares + tl.program_id(0) * TAPS * width + channel
    total = tl.zeros((ROWS, CHANNELS // GROUP, GROUP), tl.float32)
    for back in tl.static_range(TAPS):
        # A state is read by its own slot and by the slots after it.
        later = tl.load(grad + element + back * width, mask=inside & (slot + back < slots), other=0.0)
        constant = tl.load(base + back * width + channel, mask=channel < width, other=0.0)
        reached = exists & (slot + back < slots)
        factor = tl.load(tap + back * (slot_stride + tap_stride), mask=reached, other=0.0)
        total += (constant.to(tl.float32) + factor.to(tl.float32)) * later.to(tl.float32)
        before = tl.load(x + element - back * width, mask=inside & (slot >= back), other=0.0)
        product = own * before.to(tl.float32)
        tl.store(grad_tap + back * (width // GROUP), tl.sum(product, 2)[:, :, None], mask=exists)
        tl.store(share + back * width, tl.sum(product, 0)[None, :, :], mask=channel < width)
    tl.store(grad_x + element, total, mask=inside)
