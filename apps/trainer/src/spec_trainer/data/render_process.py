"""RenderProcess: chat templates are rendered in a process of their own, which can be killed.

A template is a program of the target's. Its sandbox bounds neither time nor memory, and no signal interrupts what
Python computes in C: ``{{ 5|round(-99999999) }}``, or the comparison of two nested lists.
"""

from __future__ import annotations

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
"""Bytes that one rendering may add to the memory of its process."""
CHARACTERS = 1 << 24
"""Characters of one rendering; a million tokens have some four million."""
_GRACE_S = 1.0
"""CPU time after which a process is killed that does not keep the limit itself."""
_LONGEST_S = 120.0
"""Seconds for one rendering, however busy the machine is, and for a message to be read."""
_TICK_S = 0.25
_REFUSED = "refused by the chat template"


class TemplateUnreadable(Exception):
    """No template of jinja; the arguments are line and message."""


class RenderProcess:
    """Starts the process when it is first needed, and again where it had to be killed."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def render(self, **arguments: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return text and marks of one conversation, given arguments of ``render_jinja_template``.

        Raise BadRow if the template fails or exceeds the limits, TemplateUnreadable if it is none.
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
        """Return the answer; kill the process and raise BadRow if it computes for longer than its limit."""
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
        """Wait for the process to send something, or to end."""
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
    """Return the one of this process."""
    return RenderProcess()
