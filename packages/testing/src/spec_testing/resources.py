"""Count the resources of a process that ``close`` must release."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

from spec_testing.limits import patient

QUIET_S = 0.25
PATIENCE_S = patient(5.0)
_counting = threading.Lock()
"""Lock that is held while a thread counts: counting opens two files, which another thread must not count."""


class Resources(NamedTuple):
    """Numbers of resources, such as threads and descriptors, that a process holds."""

    descriptors: int
    threads: int
    shared_mappings: int


def settled_resources() -> Resources:
    """Wait until this process's counts are stable, because threads end with a delay, and return them."""
    last = _count()
    since = time.monotonic()
    deadline = since + PATIENCE_S
    while time.monotonic() - since < QUIET_S and time.monotonic() < deadline:
        time.sleep(QUIET_S / 4)
        if (now := _count()) != last:
            last = now
            since = time.monotonic()
    return last


def check_released(before: Resources) -> None:
    """Assert that this process has no more resources than before.

    It may have fewer, because threads of other code may end, too.
    """
    deadline = time.monotonic() + PATIENCE_S
    while gained := [
        name for name, now, then in zip(Resources._fields, _count(), before, strict=True) if now > then
    ]:
        assert time.monotonic() < deadline, f"more {gained} than before: {before} -> {_count()}"
        time.sleep(QUIET_S / 4)


def _count() -> Resources:
    with _counting:
        with open("/proc/self/maps") as maps:
            shared = sum(line.split()[1].endswith("s") for line in maps)
        return Resources(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared)
