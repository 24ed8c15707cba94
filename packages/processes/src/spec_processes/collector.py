"""Tune Python's garbage collector for programs whose imported objects live as long as the process."""

from __future__ import annotations

import atexit
import gc

_THRESHOLDS = 50_000, 20, 50


def collect_rarely() -> None:
    """Let the garbage collector run less often in this process, and not at the process's exit.

    Call it before importing torch.

    Importing torch and transformers creates many objects that are never freed. With Python's default
    thresholds the collector traverses these objects repeatedly, which takes a third of the start's CPU time. It
    traverses them again at exit, which takes a quarter of the rest, although the kernel frees the memory anyway.
    Objects without reference cycles are freed as usual.
    """
    gc.set_threshold(*_THRESHOLDS)
    atexit.register(gc.freeze)
