"""Start an MPS daemon for a run, so that several processes can compute on a GPU at the same time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from spec_backend_cuda import mps_owner

THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_DEAD = '{"reason": "the owner of the MPS daemon died; its output is above"}'


class MpsUnavailable(RuntimeError):
    """MPS does not work on this host; the message says why."""


class MpsDaemon:
    """A running MPS daemon, in the process of the run's controller."""

    def __init__(self, environment: Mapping[str, str], owner_output: TextIO) -> None:
        """Read reports of the daemon's owner from ``owner_output``.

        ``environment``: variables that the daemon's clients need.
        """
        self.environment = environment
        """Environment variables of the daemon's clients."""
        self.ended: str | None = None
        """Name of a daemon process that has died, like ``nvidia-cuda-mps-server (pid 7)``; None if none has
        died."""
        self._leaving = False
        self._listener = threading.Thread(target=self._listen, args=(owner_output,), name="mps", daemon=True)
        self._listener.start()

    def end(self, owner_input: TextIO) -> None:
        """Make the owner end the daemon, and wait until the owner has closed its output."""
        self._leaving = True
        owner_input.close()
        self._listener.join()

    def _listen(self, owner_output: TextIO) -> None:
        for line in owner_output:
            self.ended = json.loads(line)["ended"]
        if not self._leaving:  # the owner has died, so another run may end the daemon
            self.ended = self.ended or "the owner of the MPS daemon"


@contextmanager
def mps_daemon() -> Iterator[MpsDaemon]:
    """Start an MPS daemon for this run alone. Raise MpsUnavailable if MPS does not work.

    The daemon ends when the ``with`` block ends, and also when this process or the daemon's owner is killed.
    """
    owner = subprocess.Popen(
        [sys.executable, "-I", str(Path(mps_owner.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with owner:  # leaving this block closes the owner's input and waits for the owner
            assert owner.stdin is not None
            assert owner.stdout is not None
            answer: dict[str, str] = json.loads(owner.stdout.readline() or _DEAD)
            if "reason" in answer:
                raise MpsUnavailable(answer["reason"])
            daemon = MpsDaemon(answer, owner.stdout)
            try:
                yield daemon
            finally:
                daemon.end(owner.stdin)
    finally:
        if owner.returncode:  # the owner was killed, and has not ended the daemon
            mps_owner.sweep()


def thread_percentage(environ: Mapping[str, str], share: float) -> dict[str, str]:
    """Return the environment variable that limits a client to its share of the GPU's multiprocessors.

    Shares are rounded up to whole percents, so that no multiprocessor is unused. A share of 1 means no limit,
    and the variable is then set only if a client would inherit another value.
    """
    if share == 1 and THREADS not in environ:
        return {}
    return {THREADS: str(math.ceil(round(100 * share, 6)))}
