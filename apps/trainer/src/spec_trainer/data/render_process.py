"""RenderProcess renders chat templates in a child process, which can be killed.

A template is untrusted code that comes with the target. Jinja's sandbox limits neither time nor memory. No signal
interrupts Python's C code, such as ``{{ 5|round(-99999999) }}`` or the comparison of two nested lists.
"""

from __future__ import annotations

import atexit
import os
import selectors
import subprocess
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil

from spec_core.errors import PeerLost
from spec_processes import end_group, spawn
from spec_trainer.data.errors import BadRow

if TYPE_CHECKING:
    from collections.abc import Mapping


SECONDS = 3.0
"""Seconds of CPU time for one rendering; a long conversation takes some milliseconds."""
BYTES = 1 << 30
"""Bytes that one rendering may add to the memory of the process."""
CHARACTERS = 1 << 24
"""Largest number of characters of one rendering; a million tokens have some four million."""
_GRACE_S = 1.0
"""CPU seconds beyond ``SECONDS`` after which the process is killed."""
_LONGEST_S = 120.0
"""Largest number of seconds of wall time for one rendering or for reading one message."""
_TICK_S = 0.25
_REFUSED = "refused by the chat template"


class TemplateUnreadable(Exception):
    """The text is not a valid Jinja template; the arguments are line number and message."""


class RenderProcess:
    """Renders templates in a child process, which starts when first needed, and again after it was killed."""

    def __init__(self) -> None:
        """Create the object only; the child process starts when it is first needed."""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def render(self, **arguments: Any) -> tuple[str, list[tuple[int, int]]]:
        """Render one conversation; return its text, and where its ``{% generation %}`` blocks begin and end.

        ``arguments`` are passed to ``render_jinja_template`` of Transformers. Raise BadRow if the template
        fails or exceeds a limit, TemplateUnreadable if it is not a valid template.
        """
        try:
            self._start()
            self._channel.send("render", seconds=SECONDS, bytes=BYTES, arguments=arguments)
            answer = self._answer()
        except PeerLost as error:
            self._end()
            raise BadRow(_REFUSED, "its process was killed") from error
        if answer["kind"] == "unreadable":
            raise TemplateUnreadable(answer["line"], answer["problem"])
        if answer["kind"] == "refused":
            raise BadRow(_REFUSED, answer["problem"])
        if len(answer["text"]) > CHARACTERS:
            raise BadRow(
                _REFUSED, f"it makes {len(answer['text'])} characters, expected at most {CHARACTERS}"
            )
        return answer["text"], [(start, stop) for start, stop in answer["marks"]]

    def close(self) -> None:
        """Kill the child process; ``render`` starts a new one. A process that did not start it does nothing."""
        if self._owner == os.getpid():
            self._end()

    def _start(self) -> None:
        if self._owner != os.getpid():  # a fork of the process that has started it
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return
        words = ["spec_trainer.data.render_main"]
        self._process, self._channel = spawn(words, os.environ, subprocess.DEVNULL, _LONGEST_S)
        self._wait(until=time.monotonic() + _LONGEST_S)
        self._channel.arrived()  # it says that it has imported what it needs

    def _answer(self) -> Mapping[str, Any]:
        """Return the child's answer; kill the child and raise BadRow if it exceeds its time limit."""
        if arrived := self._arrived():  # nearly always
            return arrived[0]
        most = self._cpu_s() + SECONDS + _GRACE_S
        until = time.monotonic() + _LONGEST_S
        while not (arrived := self._arrived()):
            if self._cpu_s() > most or time.monotonic() > until:
                self._end()
                raise BadRow(_REFUSED, f"it takes more than {SECONDS:g} s")
        return arrived[0]

    def _arrived(self) -> list[Any]:
        self._wait(until=time.monotonic() + _TICK_S)
        return self._channel.arrived()

    def _wait(self, until: float) -> None:
        """Wait until the child sends something or exits, at most until ``until`` (``time.monotonic``)."""
        with selectors.PollSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.select(max(0.0, until - time.monotonic()))

    def _cpu_s(self) -> float:
        assert self._process is not None
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess as error:
            raise PeerLost("the process that renders chat templates has ended") from error
        return times.user + times.system

    def _end(self) -> None:
        if self._process is not None:
            end_group(self._process.pid)
            self._process.wait()
            self._channel.close()
        self._process = None


@cache
def render_process() -> RenderProcess:
    """Return the RenderProcess that this process uses for all renderings, until it exits."""
    process = RenderProcess()
    atexit.register(process.close)
    return process
