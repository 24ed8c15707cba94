"""RenderProcess renders chat templates in a child process, which can be killed.

A template is untrusted code that comes with the target. Jinja's sandbox limits neither time nor memory. No signal
interrupts Python's C code, such as ``{{ 5|round(-99999999) }}``, the filters ``title`` and ``urlize``, or the
comparison of two nested lists. So the kernel limits both, for the child as a whole (``rendering_limits``).
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from spec_core.errors import DataError, PeerLost, RunError
from spec_processes import end_group, ending, spawn
from spec_trainer.data.errors import BadRow

SECONDS = 3.0
"""Seconds of CPU time for one rendering; a long conversation takes some milliseconds."""
BYTES = 1 << 30
"""Bytes that one rendering may add to the memory that the process has when it starts."""
CHARACTERS = 1 << 24
"""Largest number of characters of one rendering; a million tokens have some four million."""
_OWN_CHARACTERS = 1 << 18
"""Number of characters of the template's own that a rendering may have."""
_TIMES = 8
"""A rendering may have so many times the characters of what is rendered, besides the template's own."""
MOST_OVER = 5
"""Number of renderings over a limit after which the template is given up, whatever ``data.on_bad_row`` says."""
_LONGEST_S = 120.0
"""Largest number of seconds of wall time for one rendering, for reading one message, and for the start."""
_REFUSED = "refused by the chat template"
_MACHINE = "see whether memory is short or the machine is busy, then run the same command again"


class TemplateUnreadable(Exception):
    """The text is not a valid Jinja template; the arguments are line number and message."""


class OverLimit(BadRow):
    """A rendering takes more time, memory or characters than a rendering may."""


class RenderProcess:
    """Renders templates in a child process, which starts when first needed, and again after it has ended."""

    def __init__(self) -> None:
        """Create the object only; the child process starts when it is first needed."""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._num_over = 0

    def render(self, **arguments: Any) -> tuple[str, list[tuple[int, int]]]:
        """Render one conversation; return its text, and where its ``{% generation %}`` blocks begin and end.

        ``arguments`` are passed to ``render_jinja_template`` of Transformers. Raise BadRow if the template fails,
        OverLimit if it exceeds a limit, DataError if it has done so ``MOST_OVER`` times, TemplateUnreadable if it
        is not a valid template, and RunError if the machine does not let the child work.
        """
        self._start()
        limits = {"seconds": SECONDS, "bytes": BYTES, "characters": _most_characters(arguments)}
        answer = self._answer(**limits, arguments=arguments)
        if answer["kind"] == "unreadable":
            raise TemplateUnreadable(answer["line"], answer["problem"])
        if answer["kind"] == "refused":
            raise BadRow(_REFUSED, answer["problem"])
        if answer["kind"] == "over":
            raise self._over(answer["problem"])
        return answer["text"], [(start, stop) for start, stop in answer["marks"]]

    def close(self) -> None:
        """Kill the child process; ``render`` starts a new one. A process that did not start it does nothing."""
        if self._owner == os.getpid():
            self._end()

    def _start(self) -> None:
        if self._owner != os.getpid():  # a fork of the process that has started it
            self._process = None
            self._owner = os.getpid()
        if self._process is not None and self._process.poll() is None:
            return
        words = ["spec_trainer.data.render_main"]
        self._process, self._channel = spawn(words, os.environ, subprocess.DEVNULL, _LONGEST_S)
        try:
            self._received()  # it says that it has imported what it needs
        except PeerLost as error:
            how = ending(self._exit_code())
            raise RunError(
                f"the process that renders chat templates {how} as it started; {_MACHINE}"
            ) from error

    def _answer(self, **request: Any) -> Mapping[str, Any]:
        """Return the child's answer; if the kernel has ended the child for its time, an answer that says so."""
        try:
            self._channel.send("render", **request)
            return self._received()
        except PeerLost as error:
            code = self._exit_code()
            if code == -signal.SIGXCPU:
                return {"kind": "over", "problem": f"it takes more than {SECONDS:g} s"}
            if code == -signal.SIGKILL:  # not by this process, but from outside, as by the OOM killer
                raise RunError(f"the process that renders chat templates was killed; {_MACHINE}") from error
            raise BadRow(_REFUSED, f"its process {ending(code)}") from error

    def _received(self) -> Mapping[str, Any]:
        """Return the child's next message. Raise PeerLost if it has ended, RunError if it is silent."""
        until = time.monotonic() + _LONGEST_S
        while not (arrived := self._channel.arrived()):
            if time.monotonic() > until:
                self._end()
                raise RunError(
                    f"the process that renders chat templates was silent for {_LONGEST_S:g} s; {_MACHINE}"
                )
            self._wait(until)
        return arrived[0]

    def _wait(self, until: float) -> None:
        """Wait until the child sends something or exits, at most until ``until`` (``time.monotonic``)."""
        with selectors.PollSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.select(max(0.0, until - time.monotonic()))

    def _over(self, problem: str) -> DataError:
        self._num_over += 1
        if self._num_over < MOST_OVER:
            return OverLimit(_REFUSED, problem)
        return DataError(
            f"the chat template exceeded its limits {MOST_OVER} times, at last as {problem}; mend it, set "
            "data.chat_template to the file of another, or remove the rows that it is too slow for"
        )

    def _exit_code(self) -> int:
        """Return the exit code of the child, which has closed its channel; a signal's number negated."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LONGEST_S)
        code = self._process.returncode
        self._end()
        return -signal.SIGKILL if code is None else code

    def _end(self) -> None:
        if self._process is not None:
            end_group(self._process.pid)
            self._process.wait()
            self._channel.close()
        self._process = None


def _most_characters(arguments: Mapping[str, Any]) -> int:
    """Return the largest number of characters of a rendering, so that no template makes much of a little."""
    rendered = json.dumps({**arguments, "chat_template": None})
    return min(CHARACTERS, _OWN_CHARACTERS + _TIMES * len(rendered))


@cache
def render_process() -> RenderProcess:
    """Return the RenderProcess that this process uses for all renderings, until it exits."""
    process = RenderProcess()
    atexit.register(process.close)
    return process
