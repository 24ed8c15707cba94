"""Apply rotary embeddings to heads, with or without an RMS norm of each head before.

The forward and the backward pass each read the heads once. Rows of the kernels are (token, head). Channel i
of a row's first half and channel i of its second half are a pair.
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
"""Number of rows per program. Rows of 128 channels then have 4,096 channels, which keep four warps busy."""


def takes_heads(heads_TND: Tensor, angles: tuple[Tensor, Tensor]) -> bool:
    """Return whether all channels are rotated and the kernels support their number and dtype."""
    width = heads_TND.shape[-1]
    narrow = heads_TND.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return (
        narrow and heads_TND.numel() > 0 and width == 2 * angles[0].shape[-1] and width in (32, 64, 128, 256)
    )


def fused_rotate(heads_TND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return the heads, rotated; the arguments are the same as in the plain version."""
    return _Rotated.apply(heads_TND, None, 0.0, *angles)


def fused_norm_rotate(
    heads_TND: Tensor, weight_D: Tensor, eps: float, angles: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the RMS norm of each head, rotated; the arguments are the same as in the plain version."""
    return _Rotated.apply(heads_TND, weight_D, eps, *angles)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads_TND: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads_TND = _rows_whole(heads_TND)
        tokens, heads, width = heads_TND.shape
        cos, sin = cos.contiguous(), sin.contiguous()
        out = heads_TND.new_empty(heads_TND.shape)
        # Without a norm, the kernel does not read the norm's pointer.
        arguments = heads_TND, cos if weight_D is None else weight_D, cos, sin
        _rotate_rows[(triton.cdiv(tokens * heads, ROWS),)](
            *arguments,
            out,
            tokens * heads,
            heads,
            heads_TND.stride(0),
            heads_TND.stride(1),
            eps,
            HALF=width // 2,
            NORM=weight_D is not None,
            ROWS=ROWS,
        )
        ctx.eps = eps
        ctx.save_for_backward(*(() if weight_D is None else (heads_TND, weight_D)), cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *normed, cos, sin = ctx.saved_tensors
        grad = _rows_whole(grad)
        tokens, heads, width = grad.shape
        source, weight = normed or (grad, cos)
        programs = triton.cdiv(tokens * heads, ROWS)
        out = grad.new_empty(grad.shape)
        shares = torch.empty(programs if normed else 0, width, dtype=torch.float32, device=grad.device)
        _rotate_gradients[(programs,)](
            grad,
            source,
            weight,
            cos,
            sin,
            out,
            shares if normed else out,
            tokens * heads,
            heads,
            grad.stride(0),
            grad.stride(1),
            source.stride(0),
            source.stride(1),
            ctx.eps,
            HALF=width // 2,
            NORM=bool(normed),
            ROWS=ROWS,
        )
        return out, shares.sum(0).to(weight.dtype) if normed else None, None, None, None


def _rows_whole(heads_TND: Tensor) -> Tensor:
    """Return the heads with contiguous channels in each row; strides between rows are arbitrary."""
    return heads_TND if heads_TND.stride(-1) == 1 else heads_TND.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows(
    heads, weight, cos, sin, out, num_rows, num_heads, token_stride, head_stride, eps,
    HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    token = (row // num_heads).to(tl.int64)
    head = row % num_heads
    channel = tl.arange(0, HALF)[None, :]
    source = heads + (token * token_stride + head * head_stride)[:, None] + channel
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + channel).to(tl.float32)
        second *= scale * tl.load(weight + HALF + channel).to(tl.float32)
    angle = token[:, None] * HALF + channel
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * (2 * HALF) + channel
    tl.store(target, first * c - second * s, mask=inside)
    tl.store(target + HALF, second * c + first * s, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_gradients(
    grad, heads, weight, cos, sin, out, shares, num_rows, num_heads,
    grad_token_stride, grad_head_stride, token_stride, head_stride, eps,
    HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    token = (row // num_heads).to(tl.int64)
    head = row % num_heads
    channel = tl.arange(0, HALF)[None, :]
    source = grad + (token * grad_token_stride + head * grad_head_stride)[:, None] + channel
    turned_first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    turned_second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = token[:, None] * HALF + channel
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    first = turned_first * c + turned_second * s
    second = turned_second * c - turned_first * s
    if NORM:
        source = heads + (token * token_stride + head * head_stride)[:, None] + channel
        x_first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        x_second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        x_first *= scale
        x_second *= scale
        share = shares + tl.program_id(0).to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)
        tl.store(share, tl.sum(first * x_first, 0))
        tl.store(share + HALF, tl.sum(second * x_second, 0))
        first *= tl.load(weight + channel).to(tl.float32)
        second *= tl.load(weight + HALF + channel).to(tl.float32)
        along = ((tl.sum(first * x_first, 1) + tl.sum(second * x_second, 1)) / (2 * HALF))[:, None]
        first = scale * (first - x_first * along)
        second = scale * (second - x_second * along)
    target = out + row.to(tl.int64)[:, None] * (2 * HALF) + channel
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)
