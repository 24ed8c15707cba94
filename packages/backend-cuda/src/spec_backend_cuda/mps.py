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
_DEAD = '{"reason": "the guard of the MPS daemon died; what it said is above"}'


class MpsUnavailable(RuntimeError):
    """This host has no MPS that works; the message says why."""


class MpsDaemon:
    """A daemon that runs, seen from the launcher."""

    def __init__(self, environment: Mapping[str, str], guard_says: TextIO) -> None:
        self.environment = environment
        """What its clients need in theirs."""
        self.ended: str | None = None
        """Who of it has died, as ``nvidia-cuda-mps-server (pid 7)``."""
        self._leaving = False
        self._listener = threading.Thread(target=self._listen, args=(guard_says,), name="mps", daemon=True)
        self._listener.start()

    def leave(self, guard_hears: TextIO) -> None:
        """Tells the guard to end the daemon, and waits until it says no more."""
        self._leaving = True
        guard_hears.close()
        self._listener.join()

    def _listen(self, guard_says: TextIO) -> None:
        for line in guard_says:
            self.ended = json.loads(line)["ended"]
        if not self._leaving:  # another run may end the daemon now, which nobody owns
            self.ended = self.ended or "the guard of the MPS daemon"


@contextmanager
def mps_daemon() -> Iterator[MpsDaemon]:
    """Starts a daemon for this run alone. Raises MpsUnavailable.

    The daemon ends with the block, and also when this process, or the guard, is killed.
    """
    guard = subprocess.Popen(
        [sys.executable, "-I", str(Path(mps_guard.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with guard:  # leaving it closes the guard's input and waits for it
            assert guard.stdin is not None
            assert guard.stdout is not None
            answer: dict[str, str] = json.loads(guard.stdout.readline() or _DEAD)
            if "reason" in answer:
                raise MpsUnavailable(answer["reason"])
            daemon = MpsDaemon(answer, guard.stdout)
            try:
                yield daemon
            finally:
                daemon.leave(guard.stdin)
    finally:
        if guard.returncode:  # it was killed, and has ended nothing
            mps_guard.sweep()


def thread_percentage(environ: Mapping[str, str], share: float) -> dict[str, str]:
    """Caps a client at its share of the GPU's multiprocessors, rounded up so that shares leave none unused. A whole
    share is no cap: it is said only where a client would inherit one."""
    if share == 1 and THREADS not in environ:
        return {}
    return {THREADS: str(math.ceil(round(100 * share, 6)))}
