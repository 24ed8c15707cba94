"""What the children of these tests do: ``roles:NAME`` in their order."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    from contextlib import ExitStack

    from spec_core.processes.control import ControlChannel, Record


def obedient(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Ready until it is told to stop."""
    channel.send("ready", pid=os.getpid())
    for record in channel.records():
        if record["kind"] == "stop":
            channel.send("finished")
            return


def deaf(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Ready, alive, and reads nothing."""
    channel.send("ready")
    time.sleep(60)


def silent(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Lets go of the launcher, as a process does that is dying, and does not end: a driver may hold it up."""
    channel.close()
    time.sleep(60)


def loading(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Never ready."""
    channel.send("loading")
    time.sleep(60)


def quitter(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    os._exit(3)


def failing(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """What it has opened takes its time to close."""
    stack.callback(time.sleep, 5)
    raise ValueError("what went wrong\nand where")


def unheard(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Its log is on a full disk, which is what it fails of."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), sys.stderr.fileno())
    raise OSError(errno.ENOSPC, "No space left on device")


class AcceleratorError(RuntimeError):
    """As torch calls it."""


def broken_device(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    raise AcceleratorError("CUDA error: an illegal memory access was encountered")


def aborting(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    os.abort()


def misused(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    raise ConfigError("engine.colour=blue: expected red")


def bereft(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    raise PeerLost("another process has gone")


def parent(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Starts a process of its own that does not end when asked."""
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; sleep 600"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    channel.send("ready", pid=child.pid)
    time.sleep(60)
