"""``then`` returns a future that depends on another future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def then(future: Future[A], read: Callable[[A], B]) -> Future[B]:
    """Return a future whose result is ``read`` of the result of ``future``, or the error of either.

    If it is cancelled, ``future`` is cancelled, too.
    """
    result: Future[B] = Future()

    def finish(done: Future[A]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(read(done.result()))
        except Exception as error:  # noqa: BLE001 (the caller gets every error, by the future)
            result.set_exception(error)

    def cancel(done: Future[B]) -> None:
        if done.cancelled():
            future.cancel()

    result.add_done_callback(cancel)
    future.add_done_callback(finish)
    return result
