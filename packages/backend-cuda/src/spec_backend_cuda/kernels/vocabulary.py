"""Reduce rows of logits, compare them with a teacher's distribution, and compute gradients in place.

A Triton program handles one row, BLOCK columns at a time. A second read of the row comes from the cache.
Arithmetic is float32.
"""

# ruff: noqa: ANN001, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Distribution = tuple[Tensor, Tensor]

BLOCK = 4096
WARPS = 8


def takes_logits(logits: Tensor, *_: object) -> bool:
    """Return whether the kernels support the dtype."""
    return logits.numel() > 0 and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


def fused_logsumexp_argmax(logits_XV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as the plain ``logsumexp_argmax``, in one pass over the logits."""
    rows = logits_XV.contiguous().flatten(0, -2)
    top_X, sum_X = (logits_XV.new_empty(logits_XV.shape[:-1], dtype=torch.float32) for _ in range(2))
    index_X = torch.empty_like(top_X, dtype=torch.int64)
    _logsumexp_argmax_rows[(len(rows),)](rows, top_X, sum_X, index_X, rows.shape[1], BLOCK, num_warps=WARPS)
    return top_X, sum_X, index_X


def fused_distill_terms(
    logits_RSV: Tensor, log_sum_RS: Tensor, teacher: Distribution, mass_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as the plain ``distill_terms``, in one pass over the logits."""
    positions, steps, width = logits_RSV.shape
    aligned, overlap, below = (torch.empty_like(log_sum_RS, dtype=torch.float32) for _ in range(3))
    # Rows of one position run at the same time, so that they share the teacher's logits in the cache.
    _distill_terms_rows[(steps, positions)](
        logits_RSV.contiguous(),
        log_sum_RS.contiguous(),
        *_contiguous(teacher, mass_R),
        aligned,
        overlap,
        below,
        width,
        BLOCK,
        num_warps=WARPS,
    )
    return aligned, overlap, below


def fused_distill_grad_(
    logits_RSV: Tensor,
    log_sum_RS: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
    teacher: Distribution,
    mass_R: Tensor,
) -> Tensor:
    """Overwrite the logits with their gradient, like the plain ``distill_grad_``."""
    positions, steps, width = logits_RSV.shape
    _distill_grad_rows[(steps, positions)](
        logits_RSV,
        log_sum_RS.contiguous(),
        *_contiguous(teacher, mass_R),
        *(factor.contiguous() for factor in factors),
        width,
        BLOCK,
        num_warps=WARPS,
    )
    return logits_RSV


def fused_scaled_softmax_(logits_XV: Tensor, log_sum_X: Tensor, factor_X: Tensor) -> Tensor:
    """Overwrite the logits with factor · softmax, like the plain ``scaled_softmax_``."""
    inputs = logits_XV, log_sum_X.contiguous(), factor_X.contiguous()
    grid = log_sum_X.numel(), triton.cdiv(logits_XV.shape[-1], BLOCK)
    _scaled_softmax_rows[grid](*inputs, logits_XV.shape[-1], BLOCK, num_warps=WARPS)
    return logits_XV


def _contiguous(teacher: Distribution, mass_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits_RV, log_sum_R = teacher
    return logits_RV.contiguous(), log_sum_R.contiguous(), mass_R.contiguous()


@triton.jit
def _logsumexp_argmax_rows(logits, top_out, sum_out, index_out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    source = logits + row * width
    top = -float("inf")
    total = 0.0
    best_start = 0
    for start in range(0, width, BLOCK):
        value = tl.load(source + start + column, mask=start + column < width, other=-float("inf")).to(
            tl.float32
        )
        block_top = tl.max(value, 0)
        best_start = tl.where(block_top > top, start, best_start)
        wider = tl.maximum(top, block_top)
        total = total * tl.exp(top - wider) + tl.sum(tl.exp(value - wider), 0)
        top = wider
    # The first column with the largest logit, in the first block that has it.
    index = best_start + column
    value = tl.load(source + index, mask=index < width, other=-float("inf")).to(tl.float32)
    # A row of NaN has no largest logit.
    first = tl.min(tl.where(value == top, index, width - 1), 0)
    tl.store(index_out + row, first.to(tl.int64))
    tl.store(top_out + row, top)
    tl.store(sum_out + row, total)


@triton.jit
def _probabilities(logits, log_sum, teacher, teacher_log_sum, column, width, BLOCK: tl.constexpr):
    """Return the row's logits, its softmax q and the teacher's p at some columns; 0 outside the row."""
    inside = column < width
    own = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(teacher + column, mask=inside, other=0.0).to(tl.float32)
    q = tl.where(inside, tl.exp(own - log_sum), 0.0)
    return own, q, tl.where(inside, tl.exp(other - teacher_log_sum), 0.0)


@triton.jit
def _distill_terms_rows(
    logits, log_sum, teacher, teacher_log_sum, mass, aligned_out, overlap_out, below_out, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(1).to(tl.int64)
    row = position * tl.num_programs(0) + tl.program_id(0)
    row_log_sum = tl.load(log_sum + row).to(tl.float32)
    row_teacher = tl.load(teacher_log_sum + position).to(tl.float32)
    share = tl.load(mass + position).to(tl.float32)
    aligned = tl.zeros((BLOCK,), tl.float32)
    overlap = tl.zeros((BLOCK,), tl.float32)
    below = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        own, q, p = _probabilities(
            logits + row * width, row_log_sum, teacher + position * width, row_teacher, column, width, BLOCK
        )
        aligned += p * own
        overlap += tl.minimum(share * p, q)
        below += tl.where(q < share * p, q, 0.0)
    tl.store(aligned_out + row, tl.sum(aligned, 0))
    tl.store(overlap_out + row, tl.sum(overlap, 0))
    tl.store(below_out + row, tl.sum(below, 0))


@triton.jit
def _distill_grad_rows(
    logits, log_sum, teacher, teacher_log_sum, mass, own_factor, below_factor, teacher_factor, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(1).to(tl.int64)
    row = position * tl.num_programs(0) + tl.program_id(0)
    row_log_sum = tl.load(log_sum + row).to(tl.float32)
    row_teacher = tl.load(teacher_log_sum + position).to(tl.float32)
    share = tl.load(mass + position).to(tl.float32)
    a = tl.load(own_factor + row).to(tl.float32)
    b = tl.load(below_factor + row).to(tl.float32)
    c = tl.load(teacher_factor + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        _, q, p = _probabilities(
            logits + row * width, row_log_sum, teacher + position * width, row_teacher, column, width, BLOCK
        )
        grad = q * tl.where(q < share * p, a + b, a) - c * p
        tl.store(logits + row * width + column, grad, mask=column < width)


@triton.jit
def _scaled_softmax_rows(logits, log_sum, factor, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointer = logits + row * width + column
    value = tl.load(pointer, mask=column < width, other=0.0).to(tl.float32)
    scaled = tl.exp(value - tl.load(log_sum + row).to(tl.float32)) * tl.load(factor + row).to(tl.float32)
    tl.store(pointer, scaled, mask=column < width)
