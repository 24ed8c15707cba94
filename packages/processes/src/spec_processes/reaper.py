"""Reaper: a process that ends what this one leaves behind when it dies of kill -9.

The kernel kills the children of ``spawn`` with their parent, but not the processes that they have started. The reaper
reads process groups from its standard input. At the end of the input it kills every process of every group. This file
is its program, too: it imports the standard library only.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from contextlib import suppress


class Reaper:
    """This process's end of a reaper; nobody else holds the write end of its input."""

    def __init__(self) -> None:
        """Start the reaper's process, which ends with this one."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def add(self, group: int) -> None:
        """Have a process group killed at the death of this process."""
        self._note(group)

    def remove(self, group: int) -> None:
        """Take a group back that has ended: its number may be another group's later."""
        self._note(-group)

    def keep_until_exit(self) -> None:
        """Let the reaper act once this process has ended, whatever has ended it; it cannot be closed any more."""
        assert self._process.stdin is not None
        held = os.dup(self._process.stdin.fileno())  # Python closes no bare descriptor while it shuts down
        self._process.stdin.close()
        os.register_at_fork(after_in_child=functools.partial(os.close, held))

    def close(self) -> None:
        """Dismiss the reaper: every group has ended. It may have been stopped."""
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _note(self, group: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it: the kernel still ends the children themselves
            self._process.stdin.write(b"%d\n" % group)
            self._process.stdin.flush()


def end_group(group: int) -> None:
    """Kill every process of a group; do nothing if there is none."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def ending(code: int) -> str:
    """Return how a process ended, given its return code as ``subprocess`` has it: ``was killed by signal 9``."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def main() -> None:
    """Wait for the end of the input; then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may reach every process of a service
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for number in map(int, sys.stdin):
        groups.add(number) if number > 0 else groups.discard(-number)
    for group in groups:
        end_group(group)


if __name__ == "__main__":
    main()
