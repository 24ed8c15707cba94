"""Run a function in a daemon thread, so that a second Ctrl-C does not wait for a server that answers slowly.

A thread of a ThreadPoolExecutor is no daemon: the interpreter waits for it before it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

R = TypeVar("R")


def in_background(function: Callable[[], R], name: str) -> Future[R]:
    """Call ``function`` in a daemon thread with this name, and return a future of its result."""
    result: Future[R] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 (the top of a thread: the caller gets every error)
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
