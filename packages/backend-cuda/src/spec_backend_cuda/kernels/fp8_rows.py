"""Round rows to fp8, each row with its own scale.

A Triton program handles one row, BLOCK columns at a time. A second read of the row comes from the cache.
"""

# ruff: noqa: ANN001, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_BLOCK = 8192
WARPS = 8


def takes_rows(rows: Tensor, *_: object) -> bool:
    """Return whether the kernel supports the dtype."""
    return rows.numel() > 0 and rows.dtype in (torch.bfloat16, torch.float16, torch.float32)


def fused_quantize_rows(rows_RK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the same as the plain ``quantize_rows``, in one pass over rows that fit in a block."""
    rows_RK = rows_RK.contiguous()
    rows, width = rows_RK.shape
    largest = torch.finfo(dtype).max
    values_RK = torch.empty_like(rows_RK, dtype=dtype)
    scale_R1 = rows_RK.new_empty(rows, 1, dtype=torch.float32)
    block = min(LONGEST_BLOCK, triton.next_power_of_2(width))
    smallest = torch.finfo(torch.float32).tiny
    _quantize_rows[(rows,)](rows_RK, values_RK, scale_R1, width, largest, smallest, block, num_warps=WARPS)
    return values_RK, scale_R1


@triton.jit
def _quantize_rows(source, values, scale_out, width, largest, smallest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        index = start + column
        value = tl.load(source + row * width + index, mask=index < width, other=0.0).to(tl.float32)
        size = tl.abs(value)
        peak = tl.where(size > peak, size, tl.where(size == size, peak, float("inf")))
    scale = tl.maximum(tl.max(peak, 0) / largest, smallest)
    tl.store(scale_out + row, scale)
    for start in range(0, width, BLOCK):
        index = start + column
        inside = index < width
        value = tl.load(source + row * width + index, mask=inside, other=0.0).to(tl.float32) / scale
        value = tl.where(value > largest, largest, tl.where(value < -largest, -largest, value))
        tl.store(values + row * width + index, value.to(values.dtype.element_ty), mask=inside)
