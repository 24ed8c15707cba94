"""A Reaper is a process that kills this process's descendants when this process dies, even of SIGKILL.

The kernel kills the children of ``spawn`` with their parent, but not the processes that they have started.
The reaper reads ids of process groups from its standard input. At end of file it kills every process of every
group. The reaper runs this file as its program, so the file imports the standard library only.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from contextlib import suppress


class Reaper:
    """Starts and controls a reaper process; only this process holds the write end of the reaper's input."""

    def __init__(self) -> None:
        """Start the reaper process, which ends when this process ends."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def add(self, group: int) -> None:
        """Register a process group, which the reaper kills when this process dies."""
        self._note(group)

    def remove(self, group: int) -> None:
        """Unregister a process group that has ended, because the kernel may reuse its id."""
        self._note(-group)

    def keep_until_exit(self) -> None:
        """Keep the reaper until this process ends, however it ends; ``close`` must not be called afterwards."""
        assert self._process.stdin is not None
        held = os.dup(self._process.stdin.fileno())  # stays open while Python shuts down
        self._process.stdin.close()
        os.register_at_fork(after_in_child=functools.partial(os.close, held))

    def close(self) -> None:
        """Kill the reaper, which may be stopped (SIGSTOP). Every registered group must have ended."""
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _note(self, group: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reaper was killed: the kernel still kills direct children
            self._process.stdin.write(b"%d\n" % group)
            self._process.stdin.flush()


def end_group(group: int) -> None:
    """Kill every process of a process group; do nothing if the group has no process."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def ending(code: int) -> str:
    """Return how a process ended, such as ``was killed by signal 9``.

    ``code``: return code as in ``subprocess``.
    """
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def main() -> None:
    """Read process-group ids until end of file, then kill the registered groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may be sent to all processes of a service
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for number in map(int, sys.stdin):
        groups.add(number) if number > 0 else groups.discard(-number)
    for group in groups:
        end_group(group)


if __name__ == "__main__":
    main()
