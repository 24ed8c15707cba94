"""BadRow is the error for a single row of the data; a fault of the machine never becomes one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from spec_core import foreign_errors
from spec_core.errors import DataError, RunError
from spec_core.foreign import cause

_OF_A_NAME = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EINVAL, errno.ENXIO, errno.ENODEV,
)  # fmt: skip
"""Errors of the file system that a row causes by the name of a file."""


class BadRow(DataError):
    """A row that cannot be used.

    The data report counts rows by ``reason``; ``detail`` describes this row. A ``harmless`` row is well formed but
    useless, such as a row that is too short: it is dropped even with ``data.on_bad_row=error``.
    """

    def __init__(self, reason: str, detail: str = "", *, harmless: bool = False) -> None:
        """Set the reason, by which rows are counted, and the detail of this row."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.harmless = harmless

    @property
    def reason(self) -> str:
        """The kind of problem, without the detail of this row."""
        return str(self).partition(": ")[0]


class UnusableTemplate(DataError):
    """A chat template that is missing or cannot be read; its ``problem`` stands without what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        """Set what is wrong, and what to do where ``data.chat_template`` can be set."""
        super().__init__(problem, remedy)  # both, so that it passes between processes
        self.problem = problem

    def __str__(self) -> str:
        """Return the problem and the remedy in one line."""
        return "; ".join(self.args)


@contextmanager
def row_errors(reason: str) -> Iterator[None]:
    """Raise BadRow for any foreign error in the block; RunError if the machine is at fault, not the row."""
    try:
        with foreign_errors(BadRow, reason):
            yield
    except BadRow as bad:
        check_machine(bad)
        raise


def check_machine(error: BaseException) -> None:
    """Raise RunError if the machine caused ``error``: too few file descriptors, too little memory, a broken disk."""
    first: BaseException | None = error
    while first is not None:
        named = isinstance(first, OSError) and first.errno in (None, *_OF_A_NAME)
        if isinstance(first, OSError | MemoryError) and not named:
            raise RunError(
                f"a row cannot be read, and the machine is at fault: {cause(first)}; raise the limit (ulimit -a "
                "shows it) or end other programs, then run the same command again"
            ) from error
        first = first.__cause__
