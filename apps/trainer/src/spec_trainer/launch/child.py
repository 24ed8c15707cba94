"""Entry of every child process of the local launcher: ``python -m spec_trainer.launch.child NAME FD PARENT``.

The first record on the control channel, the order, says what to be: its ``entry`` names a ``Role``. A child lives no
longer than its launcher: the kernel kills it when the launcher dies, whatever the launcher died of.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol

from spec_core.errors import PeerLost
from spec_trainer.launch.control import ControlChannel

if TYPE_CHECKING:
    from spec_trainer.launch.control import Record

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HEARTBEATS_PER_TIMEOUT = 8


class Role(Protocol):
    def __call__(self, stack: ExitStack, channel: ControlChannel, order: Record) -> None:
        """``stack`` closes what the role opens, after a failure has been reported."""


def main() -> int:
    name, descriptor, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    die_with(parent)
    faulthandler.enable()
    _leave_signals_to_launcher()
    os.set_inheritable(descriptor, False)
    channel = ControlChannel(socket.socket(fileno=descriptor))
    order = next(channel.records(), None)
    if order is None:
        return 1
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _start_heartbeat(channel, order["peer_s"])
    return _run(channel, order)


def _run(channel: ControlChannel, order: Record) -> int:
    """The process's top. Whatever went wrong is told to the launcher before anything is closed: closing is what the
    other processes would fail of, and the first failure is the one that the person is told."""
    with ExitStack() as stack:
        try:
            role: Role = pkgutil.resolve_name(order["entry"])
            role(stack, channel, order)
        except Exception as error:  # noqa: BLE001 (top of a process)
            traceback.print_exc()
            channel.report(error)
            return 1
    return 0


def _start_heartbeat(channel: ControlChannel, peer_s: float) -> None:
    """Tells the launcher that this process runs, not only that it exists: a stopped one goes silent. Before anything
    heavy is imported, so that a slow start is no silence."""

    def beat() -> None:
        pause = threading.Event()
        with suppress(PeerLost):
            while not pause.wait(peer_s / _HEARTBEATS_PER_TIMEOUT):
                channel.send("alive")

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _leave_signals_to_launcher() -> None:
    """SIGTERM may reach every process of a service or a batch job; only the launcher acts on it, so that a
    checkpoint can be saved. A handler rather than SIG_IGN: a program that this process starts does not inherit it.
    (A terminal's SIGINT does not come here: a child has its own session.)"""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, whatever it ends of."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
