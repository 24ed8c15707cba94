"""Holes: which ranges of an arena's addresses are free."""

from __future__ import annotations

import bisect

Range = tuple[int, int]
"""First address and one past the last."""


class Holes:
    """Lowest address first. Ranges that touch become one."""

    def __init__(self, size: int) -> None:
        self._free: list[Range] = [(0, size)]

    def take(self, size: int) -> Range | None:
        """The lowest range of that size, or None while no hole is large enough."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start, start + size
        return None

    def take_scattered(self, size: int) -> list[Range] | None:
        """Ranges that add up to that size: one if possible; None if all holes together are too small."""
        if (whole := self.take(size)) is not None:
            return [whole]
        if sum(stop - start for start, stop in self._free) < size:
            return None
        pieces: list[Range] = []
        while size:
            start, stop = self._free[0]
            piece = self.take(min(size, stop - start))
            assert piece is not None
            pieces.append(piece)
            size -= piece[1] - piece[0]
        return pieces

    def give(self, start: int, stop: int) -> Range:
        """Frees a range that was taken; returns the hole that it is now part of."""
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
        return start, stop
