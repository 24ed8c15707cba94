"""Set how OpenMP threads wait for each other."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that set how threads wait. Nothing is changed if the user has set one of them."""
_SPINS = "1000"
"""Number of spins before a waiting thread sleeps: a few microseconds. The default is 300,000."""


def let_waiting_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's OpenMP threads, here and in child processes, sleep instead of spinning while they wait.

    Call it before torch is imported. By default the threads spin for milliseconds. If other programs use the cores,
    too, a spinning thread may occupy the core that the awaited thread needs. A small model then trains many times
    slower.
    """
    if not any(name in environment for name in _CHOICES):
        environment["GOMP_SPINCOUNT"] = _SPINS
