"""Limits of time and memory for a chat template: a program of the target's, whose sandbox bounds neither."""

from __future__ import annotations

import resource
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 3
"""Seconds of CPU time for one rendering; a long conversation takes some milliseconds."""
BYTES = 1 << 30
"""Bytes that one rendering may add to the memory of the process."""


class OutOfTime(Exception):
    """A template ran for longer than the limit."""


@contextmanager
def rendering_limits() -> Iterator[None]:
    """Raise OutOfTime or MemoryError where the ``with`` block exceeds the limits.

    The timer can interrupt the main thread only, where data is read; another thread has the limit of memory alone.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + BYTES
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        if threading.current_thread() is threading.main_thread():
            with _clock():
                yield
        else:
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _clock() -> Iterator[None]:
    before = signal.signal(signal.SIGVTALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()


def _out_of_time(*_: object) -> None:
    raise OutOfTime(f"it takes more than {SECONDS} s")
