"""Python's garbage collector in programs whose imports and configuration stay for as long as the process lives."""

from __future__ import annotations

import atexit
import gc

_THRESHOLDS = 50_000, 20, 50


def collect_rarely() -> None:
    """Let the garbage collector run less often in this process, and not at its end; call it before importing torch.

    Importing torch and transformers makes objects that all stay. With Python's own thresholds a third of the CPU time
    of such a start goes into walking through them again and again, and a quarter of what is left into walking through
    them when the process ends, whose memory the kernel frees anyway. Objects without cycles are freed as ever.
    """
    gc.set_threshold(*_THRESHOLDS)
    atexit.register(gc.freeze)
