"""Entry of every child process of the local launcher: ``python -m spec_launcher_local.child NAME FD PARENT``.

The first record on the control channel, the order, says what to be: its ``entry`` names a ``Role``. Where it says
``waits``, the child loads what it needs, and begins with the next record. A child lives no longer than its launcher:
the kernel kills it when the launcher dies, whatever the launcher died of.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import pkgutil
import signal
import sys
import traceback
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol

from spec_core.processes.spawn import channel_to_parent

if TYPE_CHECKING:
    from spec_core.processes.control import ControlChannel, Record


class Role(Protocol):
    def __call__(self, stack: ExitStack, channel: ControlChannel, order: Record) -> None:
        """``stack`` closes what the role opens, after a failure has been reported."""


def main() -> int:
    name, descriptor, parent = sys.argv[1:]
    channel = channel_to_parent(descriptor, parent)
    faulthandler.enable()
    _leave_signals_to_launcher()
    order = next(channel.records(), None)
    if order is None:
        return 1
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s",
        stream=sys.stderr,
    )
    channel.keep_alive(order["peer_s"])
    return _run(channel, order)


def _run(channel: ControlChannel, order: Record) -> int:
    """The process's top. Whatever went wrong is told to the launcher before anything is closed: closing is what the
    other processes would fail of, and the first failure is the one that the person is told."""
    with ExitStack() as stack:
        try:
            role: Role = pkgutil.resolve_name(order["entry"])
            if order.get("waits") and next(channel.records(), None) is None:
                return 1
            role(stack, channel, order)
        except Exception as error:  # noqa: BLE001 (top of a process)
            with suppress(OSError):  # the log may be on the full disk that this is about
                traceback.print_exc()
            channel.report(error)
            return 1
    return 0


def _leave_signals_to_launcher() -> None:
    """SIGTERM and SIGHUP may reach every process of a service or a batch job; only the launcher acts on them, so that
    a checkpoint can be saved. A handler rather than SIG_IGN: a program that this process starts does not inherit it.
    (A terminal's SIGINT does not come here: a child has its own session.)"""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not as nohup has set it
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)
            os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))


if __name__ == "__main__":
    sys.exit(main())
