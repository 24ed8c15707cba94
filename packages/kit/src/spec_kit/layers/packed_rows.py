"""PackedRows is the rows of several sequences in the form that kernels of attention take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core import to_device_async

Pair = tuple[int, int]


@dataclass(frozen=True)
class PackedRows:
    """Rows of several sequences, which are queries or keys, one sequence after the other."""

    bounds: tuple[Pair, ...]
    """First row of each sequence on the token axis, and the row after its last row. Sequences may share rows: the
    keys of several pieces of one document do."""
    device: torch.device

    @staticmethod
    @lru_cache(maxsize=16)  # a step uses the same few arguments again and again
    def of(bounds: tuple[Pair, ...], device: torch.device) -> PackedRows:
        """Return the rows of sequences, of which there is at least one."""
        return PackedRows(bounds, device)

    @cached_property
    def rows(self) -> slice | Tensor:
        """The sequences' rows on the token axis; a slice if the sequences are adjacent."""
        if all(left[1] == right[0] for left, right in pairwise(self.bounds)):
            return slice(self.bounds[0][0], self.bounds[-1][1])
        return to_device_async(torch.cat([torch.arange(*bound) for bound in self.bounds]), self.device)

    @cached_property
    def stops(self) -> list[int]:
        """The row after each sequence's last row, among ``rows``."""
        return list(accumulate(stop - start for start, stop in self.bounds))

    @cached_property
    def starts(self) -> Tensor:
        """int32 [sequences + 1]: first row of each sequence among ``rows``, then the number of rows."""
        return to_device_async(torch.tensor([0, *self.stops], dtype=torch.int32), self.device)

    @cached_property
    def overlap(self) -> bool:
        """Whether sequences share rows."""
        return any(left[1] > right[0] for left, right in pairwise(sorted(self.bounds)))

    @cached_property
    def longest(self) -> int:
        """Number of rows of the longest sequence."""
        return max(stop - start for start, stop in self.bounds)

    def spread(self, part: Tensor, num_tokens: int) -> Tensor:
        """Put the rows of ``part`` at their indices among all tokens.

        Other rows are 0, and a row that belongs to several sequences gets their sum.
        """
        if isinstance(self.rows, slice) and self.rows == slice(0, num_tokens):
            return part
        whole = part.new_zeros(num_tokens, *part.shape[1:])
        if not self.overlap:
            whole[self.rows] = part
            return whole
        # One after the other, so that results are reproducible to the bit.
        for (start, stop), (first, last) in zip(self.bounds, pairwise([0, *self.stops]), strict=True):
            whole[start:stop] += part[first:last]
        return whole


def rows_of_pieces(pieces: Sequence[tuple[int, int, int]]) -> tuple[list[Pair], list[Pair]]:
    """Return the rows of each piece's queries, and the rows of the keys to which these queries attend.

    A piece is (first token of its document, first token of the piece, last token of the piece + 1).
    """
    stops = list(accumulate((stop - first for _, first, stop in pieces), initial=0))
    return list(pairwise(stops)), [(start, stop) for start, _, stop in pieces]


def as_wide(values: Tensor, q: Tensor) -> Tensor:
    """Return ``values`` with zeros at the end of each head, as wide as ``q``, because most kernels need that."""
    missing = q.shape[-1] - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values
