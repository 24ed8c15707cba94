"""FreeList allocates and frees address ranges of an arena."""

from __future__ import annotations

import bisect

Range = tuple[int, int]
"""First address of a range, and one past its last address."""


class FreeList:
    """Allocates the lowest addresses first, and merges adjacent free ranges."""

    def __init__(self, size: int) -> None:
        """Begin with one free range of ``size`` addresses."""
        self._free: list[Range] = [(0, size)]

    def allocate(self, size: int) -> Range | None:
        """Return the lowest range of that size, or None if no free range is large enough."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start, start + size
        return None

    def allocate_scattered(self, size: int) -> list[Range] | None:
        """Return ranges with that total size, a single one if possible; None if too little is free."""
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
        """Free an allocated range, and return the merged free range that now contains it."""
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
        return start, stop
