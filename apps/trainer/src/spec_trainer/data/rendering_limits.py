"""Limit time and memory for rendering a chat template, which is untrusted code of the target."""

from __future__ import annotations

import resource
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutOfTime(Exception):
    """A template ran for longer than the limit."""


@contextmanager
def rendering_limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Raise OutOfTime or MemoryError if the ``with`` block takes too much CPU time or memory.

    ``seconds``: the limit of CPU time, which cannot interrupt C code. ``num_bytes``: memory beyond the
    process's present memory. The ``with`` block must be in the main thread.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + num_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)

    def ring(*_: object) -> None:
        raise OutOfTime(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()
