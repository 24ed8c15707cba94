"""MPS, which lets the processes of a GPU compute at the same time: a daemon per run, and what its clients need."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spec_backend_cuda import mps_guard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


class MpsUnavailable(RuntimeError):
    """This host has no MPS that works; the message says why."""


@contextmanager
def mps_daemon() -> Iterator[Mapping[str, str]]:
    """Starts a daemon for this run alone; yields the environment of its clients. Raises MpsUnavailable.

    The daemon ends with the block, and also when this process is killed.
    """
    guard = subprocess.Popen(
        [sys.executable, "-I", str(Path(mps_guard.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with guard:  # leaving it closes the guard's input and waits for it
        assert guard.stdout is not None
        answer: dict[str, str] = json.loads(guard.stdout.readline() or '{"reason": "its guard process died"}')
        if "reason" in answer:
            raise MpsUnavailable(answer["reason"])
        yield answer


def thread_percentage(share: float) -> dict[str, str]:
    """Caps a client at its share of the GPU's multiprocessors, rounded up so that shares leave none unused."""
    return {THREADS: str(math.ceil(round(100 * share, 6)))}
