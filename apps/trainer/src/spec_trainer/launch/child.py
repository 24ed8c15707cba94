"""Entry of every child process of the local launcher: ``python -m spec_trainer.launch.child FD PARENT``.

The first record on the control channel says what to be. A child lives no longer than its launcher: the kernel kills
it when the launcher dies, whatever the launcher died of.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from spec_trainer.interrupted import Interrupted
from spec_trainer.launch.control import ControlChannel

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_trainer.launch.control import Record

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HEARTBEATS_PER_TIMEOUT = 4


def main() -> int:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's to handle
    channel = ControlChannel(socket.socket(fileno=descriptor))
    order = next(channel.records(), None)
    if order is None:
        return 1
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname).1s [{order['name']}] %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _start_heartbeat(channel, order["peer_s"])
    return _run(_role(order["role"]), channel, order)


def _run(role: Callable[[ControlChannel, Record], None], channel: ControlChannel, order: Record) -> int:
    """The process's top: whatever went wrong is told to the launcher, with its cause, before the process ends."""
    try:
        role(channel, order)
    except Interrupted as stopped:
        channel.send("interrupted", message=str(stopped))
        return 0
    except Exception as error:  # noqa: BLE001 (top of a process)
        traceback.print_exc()
        channel.send("failed", error=type(error).__name__, message=str(error))
        return 1
    return 0


def _role(name: str) -> Callable[[ControlChannel, Record], None]:
    from spec_trainer.launch import engine_process, trainer_process

    return {"engine": engine_process.run, "trainer": trainer_process.run}[name]


def _start_heartbeat(channel: ControlChannel, peer_s: float) -> None:
    """Tells the launcher that this process runs, not only that it exists: a stopped one goes silent."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(peer_s / _HEARTBEATS_PER_TIMEOUT):
            channel.send("alive")

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
