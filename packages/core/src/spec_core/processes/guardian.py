"""The guardian: ends what a launcher leaves behind when it dies of kill -9.

The kernel kills the launcher's children itself (``child.py``), but not what they have started. The guardian is told
the process group of each child on its standard input; when that ends, so does every process of every group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Self


class Guardian:
    """The launcher's end. Its children must not inherit it: they hold no write end of the pipe."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def guard(self, group: int) -> None:
        """From now on the process group does not outlive this process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it: the kernel still ends the children themselves
            self._process.stdin.write(b"%d\n" % group)
            self._process.stdin.flush()

    def __exit__(self, *exc: object) -> None:
        """When every group has ended: it has nothing left to do, and may have been stopped."""
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def end_group(group: int, number: signal.Signals = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def main() -> None:
    # A service manager may signal every process of a run.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = [int(line) for line in sys.stdin]
    for group in groups:
        end_group(group)


if __name__ == "__main__":
    main()
