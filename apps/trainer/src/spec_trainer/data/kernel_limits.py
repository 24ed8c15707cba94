"""Lower for a while the limits that the kernel enforces on this process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lowered_limit(kind: int, value: int) -> Iterator[None]:
    """Lower a limit of this process, such as ``resource.RLIMIT_AS``, in the ``with`` block.

    A limit that is lower already stays as it is.
    """
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if soft == resource.RLIM_INFINITY else min(value, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let the ``with`` block raise MemoryError, if it takes ``num_bytes`` more address space than there is now."""
    with lowered_limit(resource.RLIMIT_AS, address_space() + num_bytes):
        yield


def address_space() -> int:
    """Return the number of bytes of this process's address space."""
    with open("/proc/self/statm", "rb") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()
