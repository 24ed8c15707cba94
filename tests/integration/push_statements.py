"""The statements that a push comes to, each a moment at which its process can be killed."""

import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import spec_kit.hosting
import spec_kit.weight_sync
import spec_weight_transports
from spec_kit.weight_sync import push as push_module

WATCHED = tuple(
    str(Path(str(package.__file__)).parent)
    for package in (spec_kit.weight_sync, spec_kit.hosting, spec_weight_transports)
)
ACTS = {
    *(f"socket.{name}" for name in ("connect", "send", "sendall", "sendmsg", "shutdown", "close", "detach")),
    *("write", "unlink", "rename", "replace", "mkdir", "rmdir", "ftruncate"),
}
"""Functions in C by which a process does what others see."""

Statement = tuple[str, int, str]
"""File, line and function."""


class Tracer:
    """Sees each statement that this process executes while ``Push.run`` does, on all of its threads.

    ``reached`` gets it with the number of acts before, which are only counted where that is asked for, and with the
    phase.
    """

    def __init__(self, reached: Callable[[Statement, int, int], None], *, count_acts: bool = False) -> None:
        self._reached, self._is_pushing = reached, False
        self._lock = threading.Lock()
        self._acts, self._count_acts = 0, count_acts
        self._phase = 0

    def start(self) -> None:
        # In turn: the pool of a phase has one thread, whatever it is asked for.
        push_module.ThreadPoolExecutor = lambda workers, **options: ThreadPoolExecutor(1, **options)
        if self._count_acts:
            threading.setprofile(self._note_act)
            sys.setprofile(self._note_act)
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _note_act(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return" and argument.__qualname__ in ACTS:
            with self._lock:
                self._acts += 1

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if frame.f_code.co_qualname == "Push.run":
            self._is_pushing = True
        self._phase += frame.f_code.co_qualname == "Delivery.commit"
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if event == "return" and code.co_qualname == "Push.run":
            self._is_pushing = False
        self._phase += event == "return" and code.co_qualname == "Delivery.commit"
        if event == "line" and self._is_pushing:
            with self._lock:
                self._reached((code.co_filename, frame.f_lineno, code.co_qualname), self._acts, self._phase)
        return self._step


@dataclass(frozen=True)
class Moment:
    """The time at which a statement is about to be executed."""

    statement: Statement
    time: int
    """1 for the first."""
    acts: int
    """How many acts there were before."""
    phase: int

    def kill(self) -> None:
        """Kill this process then."""
        seen = 0

        def reached(statement: Statement, acts: int, phase: int) -> None:
            nonlocal seen
            seen += statement == self.statement
            if seen == self.time:
                os.kill(os.getpid(), signal.SIGKILL)

        Tracer(reached).start()

    def __str__(self) -> str:
        file, line, function = self.statement
        text = f"{function}: {linecache.getline(file, line).strip()}"[:90]
        return text if self.time == 1 else f"{text} (time {self.time})"
