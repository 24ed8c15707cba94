"""The host's end of ``host_process.py``: what every program's host does alike.

A host is run as ``python -m MODULE FD PARENT``. It reads the order, starts the program in this process, tells that it
is ``ready``, and answers until its channel ends.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from spec_core.errors import PeerLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spec_core.processes.control import ControlChannel, Record

_LONGEST = 400
"""Characters of what a program says."""


async def answer(
    channel: ControlChannel,
    record: Record,
    work: Awaitable[Record],
    failed: Callable[[], bool] = lambda: False,
) -> None:
    """Tells what comes of ``record``: the fields that ``work`` ends with, or why it was refused. Raises what ``work``
    has where it was not the request that ``failed``, but the program."""
    try:
        fields = await work
    except Exception as error:  # whatever a program raises is told to whoever asked
        if failed():
            raise
        kind, fields = "refused", {"message": one_line(error)}
    else:
        kind = "done"
    with suppress(PeerLost):  # nobody is left to be told
        channel.send(kind, key=record["key"], **fields)


def give_up(channel: ControlChannel, error: BaseException) -> None:
    """At the top of the process: all is over."""
    traceback.print_exception(error)
    with suppress(PeerLost):
        channel.send("failed", message=one_line(error))


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
