"""Limit time and memory for rendering a chat template, which is untrusted code of the target.

The kernel enforces both limits, so they hold for everything that a template calls, also in C code.
"""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spec_trainer.data.kernel_limits import lowered_limit

_GRACE_S = 1.0
"""CPU seconds beyond the limit after which the kernel kills a process that did not end by itself."""


class OutOfTime(BaseException):
    """A template ran for longer than the limit. No ``except Exception`` of Jinja, which has some, stops it."""


@contextmanager
def rendering_limits(seconds: float, most_bytes: int) -> Iterator[None]:
    """Raise OutOfTime or MemoryError if the ``with`` block takes too much CPU time or memory.

    ``seconds``: the limit of CPU time. In C code, no exception can be raised: the kernel then ends the process by
    SIGXCPU, one to two seconds later. ``most_bytes``: the limit of the process's address space. The ``with`` block
    must be in the main thread.
    """

    def ring(*_: object) -> None:
        raise OutOfTime(f"it takes more than {seconds:g} s")

    last_second = math.ceil(time.process_time() + seconds + _GRACE_S)
    with lowered_limit(resource.RLIMIT_AS, most_bytes), lowered_limit(resource.RLIMIT_CPU, last_second):
        before = signal.signal(signal.SIGVTALRM, ring)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
