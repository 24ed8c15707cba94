"""Import a plugin, turn any error into NotImported, and restore process settings afterwards."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from spec_core.foreign import cause

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from importlib.metadata import EntryPoint
    from types import FrameType


IMPORT_S = 300.0
"""Longest wait, in seconds, for the import of a plugin's module, which needs neither torch nor a vendor's
SDK."""


_ELSEWHERE = (
    "; spec_core holds the contract alone: libraries are in spec_kit, spec_processes and spec_testing"
)


class NotImported(Exception):
    """A module did not import; the message says why."""


def import_entry_point(entry_point: EntryPoint) -> Any:
    """Return the object that an entry point names. Raise NotImported for any error, SystemExit included.

    The module's standard output goes to standard error. Process settings that the module changes are
    restored, because a command may look at a plugin that it does not use. In the main thread an import that
    takes longer than ``IMPORT_S`` seconds fails.
    """
    try:
        with _process_kept(), _limited():
            return entry_point.load()
    except KeyboardInterrupt:
        raise
    except _TooLong as error:
        raise NotImported(str(error)) from error
    except BaseException as error:
        raise NotImported(_words(error)) from error


def _words(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = cause(error)
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "spec_core":
        text += _ELSEWHERE
    name = type(error).__name__
    return text if text.startswith(name) else f"{name}: {text}"


@contextmanager
def _process_kept() -> Generator[None]:
    """Restore on exit the process settings that a module must not change, such as the working directory."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        for restore in (_kept_folder(), _kept_log(), _kept_signals(), _kept_dtype()):
            stack.callback(restore)
        yield


class _TooLong(BaseException):
    """An import has timed out. Derives from BaseException because a module may catch Exception."""


@contextmanager
def _limited() -> Generator[None]:
    """Raise _TooLong if the block takes longer than ``IMPORT_S`` seconds. Works in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        location = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        raise _TooLong(f"it was not done after {IMPORT_S:g} s, and hangs{location}")

    handler = signal.signal(signal.SIGALRM, ring)
    rest = signal.setitimer(signal.ITIMER_REAL, IMPORT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        signal.setitimer(signal.ITIMER_REAL, *rest)


def _kept_folder() -> Callable[[], None]:
    try:
        folder = os.open(".", os.O_PATH)
    except OSError:  # this user cannot open the folder, nor return to it
        return lambda: None

    def restore() -> None:
        os.fchdir(folder)
        os.close(folder)

    return restore


def _kept_log() -> Callable[[], None]:
    root = logging.root
    handlers, level, disabled = list(root.handlers), root.level, logging.root.manager.disable

    def restore() -> None:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)

    return restore


def _kept_signals() -> Callable[[], None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        return lambda: None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in handlers.items():
            if handler is not None:  # None: C code has set the handler
                signal.signal(number, handler)

    return restore


def _kept_dtype() -> Callable[[], None]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return lambda: None
    dtype = torch.get_default_dtype()
    return lambda: torch.set_default_dtype(dtype)
