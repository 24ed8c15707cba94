"""Arena is anonymous memory that several processes of one host share.

It is a memfd: a process that has the file descriptor can map it, and the kernel frees it when no process uses it.
Nothing is created in ``/dev/shm``, so nothing can remain there, and its size limit in containers does not apply.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch
from torch import Tensor

from spec_core.errors import RunError
from spec_kit.streams.free_list import FreeList

ALIGNMENT = 64
"""Alignment of blocks in bytes: a cache line, and more than any dtype needs."""

ADDRESS_WINDOWS = 16
"""Size of an arena's address range, in windows. First fit needs at most log2(largest / smallest block) times the
memory in use (Robson 1977). So blocks whose sizes differ up to 65,536-fold never wait for a large enough free
range. Unused addresses cost no memory: only pages that were written to are allocated."""


def aligned(size: int) -> int:
    """Return ``size`` rounded up to a multiple of ``ALIGNMENT``."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def create(window_bytes: int) -> tuple[int, int]:
    """Return the file descriptor and size in bytes of a new arena for ``window_bytes`` of samples.

    The arena is sealed, so no peer can shrink it.
    """
    size = _page_up(ADDRESS_WINDOWS * max(window_bytes, mmap.PAGESIZE))
    descriptor = os.memfd_create("spec-features", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:  # RLIMIT_FSIZE counts for memory without a name, too
        os.close(descriptor)
        raise RunError(
            f"shared memory of {size} bytes for features was not made: {error.strerror}; raise the limit on the size "
            f"of files (ulimit -f) or lower placement.window_bytes={window_bytes}"
        ) from error
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor, size


def attach(descriptor: int, size: int) -> tuple[mmap.mmap, Tensor]:
    """Map an arena; return the mapping and its bytes, uint8 ``[size]``. It is unmapped with its last view."""
    mapping = mmap.mmap(descriptor, size)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


class Arena:
    """Allocates blocks of shared memory, lowest addresses first. Not thread-safe.

    The pages of the first ``window_bytes`` stay allocated for the next blocks. Pages beyond, which are only used if
    memory is fragmented, are returned to the system with their block. So at most two windows are ever in memory.
    """

    def __init__(self, window_bytes: int) -> None:
        """Create an arena for ``window_bytes`` of samples."""
        self.descriptor, self.size = create(window_bytes)
        self._mapping, self.bytes = attach(self.descriptor, self.size)
        self._warm_bytes = window_bytes
        self._free_list = FreeList(self.size)
        self._blocks: dict[int, int] = {}

    def allocate(self, size: int) -> int | None:
        """Return the offset of a new block of ``size`` bytes, or None if no free range is large enough."""
        block = self._free_list.allocate(max(aligned(size), ALIGNMENT))
        if block is None:
            return None
        start, self._blocks[start] = block
        return start

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at ``offset``."""
        self._mapping[offset : offset + len(data)] = data

    def free(self, offset: int) -> None:
        """Free the block at ``offset``."""
        block_stop = self._blocks.pop(offset)
        start, stop = self._free_list.free(offset, block_stop)
        self._cool(max(start, _page_down(offset)), min(stop, _page_up(block_stop)))

    def _cool(self, start: int, stop: int) -> None:
        """Return to the system all whole pages between ``start`` and ``stop`` outside the first window."""
        start = _page_up(max(start, self._warm_bytes))
        stop = _page_down(stop)
        if stop > start:
            self._mapping.madvise(mmap.MADV_REMOVE, start, stop - start)

    def close(self) -> None:
        """Release the memory, which is freed with the last tensor that views it."""
        os.close(self.descriptor)
        del self._mapping, self.bytes


def _page_down(address: int) -> int:
    return address // mmap.PAGESIZE * mmap.PAGESIZE


def _page_up(address: int) -> int:
    return _page_down(address + mmap.PAGESIZE - 1)
