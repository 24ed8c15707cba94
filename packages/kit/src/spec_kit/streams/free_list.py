"""FreeList: which ranges of an arena's addresses are free."""

from __future__ import annotations

import bisect

Range = tuple[int, int]
"""First address and one past the last."""


class FreeList:
    """Allocates the lowest addresses first. Free ranges that touch become one."""

    def __init__(self, size: int) -> None:
        """Begin with one free range of ``size`` addresses."""
        self._free: list[Range] = [(0, size)]

    def allocate(self, size: int) -> Range | None:
        """Return the lowest range of that size, or None while no free range is large enough."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start, start + size
        return None

    def allocate_scattered(self, size: int) -> list[Range] | None:
        """Return ranges that add up to that size, one if possible; None if all together are too small."""
        if (whole := self.allocate(size)) is not None:
            return [whole]
        if sum(stop - start for start, stop in self._free) < size:
            return None
        pieces: list[Range] = []
        while size:
            start, stop = self._free.pop(0)
            if stop - start > size:
                self._free.insert(0, (start + size, stop))
                stop = start + size
            pieces.append((start, stop))
            size -= stop - start
        return pieces

    def free(self, start: int, stop: int) -> Range:
        """Free a range that was allocated and return the free range that it is now part of."""
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
        return start, stop
