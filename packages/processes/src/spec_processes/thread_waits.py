"""How threads of OpenMP wait for each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user has chosen already."""
_SPINS = "1000"
"""Turns of the loop in which a thread looks before it sleeps, some microseconds; 300,000 by default."""


def let_waiting_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's threads, here and in children, sleep soon while they wait for others at the end of a kernel.

    To be called before torch is imported. By default they spin for milliseconds. On a machine in use, a thread that
    spins holds the core that the other needs, and a small model trains many times slower.
    """
    if not any(name in environment for name in _CHOICES):
        environment["GOMP_SPINCOUNT"] = _SPINS
