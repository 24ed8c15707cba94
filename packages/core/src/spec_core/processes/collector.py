"""Python's garbage collector in programs whose imports and configuration stay for as long as the process lives."""

from __future__ import annotations

import gc

_THRESHOLDS = 50_000, 20, 50


def collect_rarely() -> None:
    """Let the garbage collector run less often in this process; to be called before torch is imported.

    Importing torch and transformers makes objects that all stay. With Python's own thresholds a third of the CPU time
    of such a start goes into walking through them again and again. Objects without cycles are freed as ever.
    """
    gc.set_threshold(*_THRESHOLDS)
