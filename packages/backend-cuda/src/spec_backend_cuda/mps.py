"""MPS, which lets the processes of a GPU compute at the same time: a daemon per run, and what its clients need."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spec_backend_cuda import mps_guard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import TextIO

THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


class MpsUnavailable(RuntimeError):
    """This host has no MPS that works; the message says why."""


class MpsDaemon:
    """A daemon that runs, seen from the launcher."""

    def __init__(self, environment: Mapping[str, str], guard_says: TextIO) -> None:
        self.environment = environment
        """What its clients need in theirs."""
        self.ended: str | None = None
        """The process of it that has died, as ``nvidia-cuda-mps-server (pid 7)``."""
        self._listener = threading.Thread(target=self._listen, args=(guard_says,), name="mps", daemon=True)
        self._listener.start()

    def join(self) -> None:
        """Until the guard, which must have been told to end, says no more."""
        self._listener.join()

    def _listen(self, guard_says: TextIO) -> None:
        for line in guard_says:
            self.ended = json.loads(line)["ended"]


@contextmanager
def mps_daemon() -> Iterator[MpsDaemon]:
    """Starts a daemon for this run alone. Raises MpsUnavailable.

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
        assert guard.stdin is not None
        assert guard.stdout is not None
        answer: dict[str, str] = json.loads(guard.stdout.readline() or '{"reason": "its guard process died"}')
        if "reason" in answer:
            raise MpsUnavailable(answer["reason"])
        daemon = MpsDaemon(answer, guard.stdout)
        try:
            yield daemon
        finally:
            guard.stdin.close()
            daemon.join()


def thread_percentage(share: float) -> dict[str, str]:
    """Caps a client at its share of the GPU's multiprocessors, rounded up so that shares leave none unused."""
    return {THREADS: str(math.ceil(round(100 * share, 6)))}
