"""Keep the lines that a panic of a compiled library prints off standard error; the exception says the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 1 << 20
"""Largest number of bytes that are printed after the block."""


@contextmanager
def without_panic_lines() -> Iterator[None]:
    """Hold back what is written to file descriptor 2 in the block; drop it if the block ends by a panic.

    A panic is an exception that is no ``Exception``. No other thread should print meanwhile.
    """
    sys.stderr.flush()
    held = os.memfd_create("stderr")
    saved = os.dup(2)
    os.dup2(held, 2)
    panicked = False
    try:
        yield
    except BaseException as error:
        panicked = not isinstance(error, Exception | KeyboardInterrupt | SystemExit)
        raise
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        if not panicked:
            os.write(2, os.pread(held, _LONGEST, 0))
        os.close(saved)
        os.close(held)
