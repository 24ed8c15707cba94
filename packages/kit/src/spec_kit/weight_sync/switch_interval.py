"""Shorten Python's thread switch interval while a draft is received."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Generator

_TURN_S = 1e-4
_lock = threading.Lock()
_num_inside = 0
_usual_s = 0.0


@contextlib.contextmanager
def short_switch_interval() -> Generator[None]:
    """Set the thread switch interval of Python to 0.1 ms while any thread is inside this context.

    After every torch call, a thread waits for the GIL again. With Python's default interval of 5 ms, the
    thousand calls of an update would take a third of a second while the engine is busy in Python.
    """
    global _num_inside, _usual_s
    with _lock:
        if _num_inside == 0:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_TURN_S, _usual_s))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                sys.setswitchinterval(_usual_s)
