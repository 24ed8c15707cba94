"""Keep a library's reports about its own memory, which it prints as the process ends, from the terminal."""

from __future__ import annotations

import atexit
import os
import sys


def drop_leak_reports() -> None:
    """Drop what a process that has loaded Triton prints after its own end; call this first of all.

    torch loads Triton. nanobind, by which Triton binds its compiler, then prints dozens of lines about objects
    that Triton has left behind.
    """
    atexit.register(_drop)  # the first that is registered is the last that is called


def _drop() -> None:
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
