"""Sums of a digest over lines of 64-bit words: each word is read once (``spec_core.weight_sync.digest``)."""

# ruff: noqa: ANN001, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 2048
"""Words at a time: 16 KiB, four 16-byte loads of each thread."""


def takes_words(words: Tensor, factors: Tensor, word_factor: int) -> bool:
    """Return whether lines are whole chunks and lie one behind the other."""
    return words.is_contiguous() and factors.is_contiguous() and words.shape[1] % CHUNK == 0


def fused_line_sums(words: Tensor, factors: Tensor, word_factor: int) -> Tensor:
    """Return the sums, [2, lines]; arguments are those of the plain version."""
    lines, columns = words.shape
    sums = words.new_empty(2, lines)
    if lines:
        _sum_lines[(lines,)](
            words, factors, sums, word_factor, lines, COLUMNS=columns, CHUNK=CHUNK, num_warps=8
        )
    return sums


@triton.jit
def _sum_lines(words, factors, sums, word_factor, lines, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    line = tl.program_id(0)
    words += line.to(tl.int64) * COLUMNS
    first = tl.zeros((CHUNK,), tl.int64)
    second = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, COLUMNS, CHUNK):
        at = start + tl.arange(0, CHUNK)
        product = tl.load(words + at) * word_factor
        upper = (product.to(tl.uint64, bitcast=True) >> 32).to(tl.int64, bitcast=True)
        mixed = product ^ upper
        first += mixed * tl.load(factors + at)
        second += mixed * tl.load(factors + COLUMNS + at)
    tl.store(sums + line, tl.sum(first, axis=0))
    tl.store(sums + lines + line, tl.sum(second, axis=0))
