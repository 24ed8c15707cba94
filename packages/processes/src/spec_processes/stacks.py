"""Make a worker that does not end write the stacks of its threads to its log before it is killed."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
from contextlib import suppress

_SIGNAL = signal.SIGUSR1
_WRITING_S = 0.5
"""Time for a worker to write its stacks, in seconds."""


def write_stacks_when_asked() -> None:
    """Let this process write its threads' stacks to standard error when its parent asks for them.

    The parent asks by ``ask_for_stacks``. This works even while a thread holds the interpreter's lock in
    foreign code.
    """
    faulthandler.register(_SIGNAL, all_threads=True)


def ask_for_stacks(process: subprocess.Popen[bytes]) -> None:
    """Ask a child process, which is about to be killed, to write its stacks; give it half a second."""
    if process.poll() is None:
        process.send_signal(_SIGNAL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_WRITING_S)
