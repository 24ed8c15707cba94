"""Let Ctrl-C wait until torch is loaded: its import loses some interrupts, and aborts the process on others."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

_AGAIN_S = 0.05
"""Seconds after which a Ctrl-C that came too early is tried again."""
_LONGEST_S = 10.0
"""Longest time for which it waits: the import may hang."""


class _Interrupt:
    def __init__(self) -> None:
        self._since_s: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= _LONGEST_S or not _loads_torch():
            self._since_s = None
            raise KeyboardInterrupt
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()


def interrupt_once_torch_is_loaded() -> None:
    """Handle SIGINT as Python does, but not while torch is loaded. A SIGINT that is ignored stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Interrupt())


def _loads_torch() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and getattr(torch.__spec__, "_initializing", False)
