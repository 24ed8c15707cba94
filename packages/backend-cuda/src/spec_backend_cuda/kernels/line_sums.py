"""Sums of a digest over lines of 64-bit words: each word is read once (``spec_kit.weight_sync.digest``)."""

# ruff: noqa: ANN001, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CHUNK = 2048
"""Words at a time: 16 KiB."""


def takes_tensors(tensors: Sequence[Tensor], factors: Tensor, word_factor: int) -> bool:
    """Return whether lines are whole chunks, and bytes lie one behind the other, where they can be read as words."""
    return (
        factors.is_contiguous()
        and factors.shape[1] % CHUNK == 0
        and all(
            tensor.is_contiguous() and tensor.device == factors.device and tensor.data_ptr() % 8 == 0
            for tensor in tensors
        )
    )


def fused_line_sums(tensors: Sequence[Tensor], factors: Tensor, word_factor: int) -> Tensor:
    """Return the sums, [2, lines], by one launch; arguments are those of the plain version."""
    columns = factors.shape[1]
    counts = [-(-tensor.nbytes // (8 * columns)) for tensor in tensors]
    *first, lines = accumulate(counts, initial=0)
    sums = factors.new_empty(2, lines)
    if lines:
        rows = [[tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors], first]
        table = torch.tensor(rows).to(factors.device, non_blocking=True)
        _sum_lines[(max(counts), len(tensors))](
            table, factors, sums, word_factor, len(tensors), lines, COLUMNS=columns, CHUNK=CHUNK, num_warps=8
        )
    return sums


@triton.jit(do_not_specialize=["tensors", "lines"])
def _sum_lines(table, factors, sums, word_factor, tensors, lines, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    table += tl.program_id(1)
    left = tl.load(table + tensors) - line * COLUMNS * 8
    if left > 0:
        address = tl.load(table) + line * COLUMNS * 8
        words = address.to(tl.pointer_type(tl.int64))
        count = tl.minimum(left // 8, COLUMNS)
        first = tl.zeros((CHUNK,), tl.int64)
        second = tl.zeros((CHUNK,), tl.int64)
        for start in range(0, COLUMNS, CHUNK):
            at = start + tl.arange(0, CHUNK)
            mixed = _mixed(tl.load(words + at, mask=at < count, other=0), word_factor)
            first += mixed * tl.load(factors + at)
            second += mixed * tl.load(factors + COLUMNS + at)
        # A word that the tensor's end leaves unfinished is put together from its bytes.
        place = tl.arange(0, 8)
        at = count * 8 + place
        is_there = at < tl.minimum(left, COLUMNS * 8)
        last = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=is_there, other=0)
        mixed = _mixed(tl.sum(last.to(tl.int64) << (8 * place), axis=0), word_factor)
        column = tl.minimum(count, COLUMNS - 1)  # beyond a whole line nothing is mixed in
        sums += tl.load(table + 2 * tensors) + line
        tl.store(sums, tl.sum(first, axis=0) + mixed * tl.load(factors + column))
        tl.store(sums + lines, tl.sum(second, axis=0) + mixed * tl.load(factors + COLUMNS + column))


@triton.jit
def _mixed(words, word_factor):
    products = words * word_factor
    return products ^ (products.to(tl.uint64, bitcast=True) >> 32).to(tl.int64, bitcast=True)
