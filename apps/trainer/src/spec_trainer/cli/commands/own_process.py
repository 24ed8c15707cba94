"""Run a step of ``spec-trainer check`` in a process of its own, so that a hang or a crash is a line of the report."""

from __future__ import annotations

import os
from multiprocessing import get_context
from typing import TYPE_CHECKING

from spec_core.errors import SpecError
from spec_processes import die_with_parent, ending

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from typing import Self

Outcome = tuple[str, bool]
"""A step's findings, and whether it passed."""

_END_S = 5.0
"""Seconds to wait for the process to exit before it is killed."""


def outcome_of(step: Callable[[], str]) -> Outcome:
    """Run a step in this process."""
    try:
        return step(), True
    except (SpecError, RuntimeError, OSError, ImportError) as error:
        return described(error), False


def described(error: BaseException) -> str:
    """Return type and message of an error, and those of its causes that the message does not contain."""
    text = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    while cause is not None:
        if str(cause) not in text:
            text += f" (because of {type(cause).__name__}: {cause})"
        cause = cause.__cause__
    return text


class OwnProcess:
    """A process that runs a step from the start of the ``with`` block; it is dead after the block."""

    def __init__(self, step: Callable[[], str]) -> None:
        """Set the step, which can be pickled."""
        context = get_context("spawn")
        self._receiving, self._sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(self._sending, step))

    def ended(self, limit_s: float) -> bool:
        """Wait at most ``limit_s`` for the step's end, and return whether it has ended."""
        return self._receiving.poll(limit_s)

    def outcome(self, limit_s: float) -> Outcome:
        """Return the step's outcome; the step fails if its process ends early or takes longer than ``limit_s``."""
        if not self.ended(limit_s):
            return f"not finished after {limit_s:.0f} s", False
        try:
            detail, passed = self._receiving.recv()
        except EOFError:
            self._process.join()
            return f"its process {ending(self._process.exitcode or 0)}", False
        return detail, passed

    def __enter__(self) -> Self:
        """Start the process."""
        self._process.start()
        self._sending.close()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait a little, and kill the process; the kernel then kills those that it has started."""
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        self._receiving.close()


def _run(sending: Connection, step: Callable[[], str]) -> None:
    die_with_parent()
    os.dup2(2, 1)  # standard output is the report's
    try:
        outcome = step(), True
    except Exception as error:  # noqa: BLE001 (the top of this process)
        outcome = described(error), False
    sending.send(outcome)
