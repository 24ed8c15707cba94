"""Start a child process with a control channel, and set the child up.

The child leads a new process group and holds one side of a control channel. The kernel kills the child when the
thread that started it ends, for whatever reason.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from spec_processes.collector import collect_rarely
from spec_processes.control import ControlChannel
from spec_processes.safe_path import SAFE_PATH

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def spawn(
    words: Sequence[str], env: Mapping[str, str], output: int | IO[bytes], peer_s: float
) -> tuple[subprocess.Popen[bytes], ControlChannel]:
    """Start ``python -m WORDS FD PARENT`` as a child; return the process and the control channel to it.

    FD is the child's end of the channel, and PARENT the id of this process. ``peer_s``: longest wait, in seconds,
    for the child to read a message.
    """
    ours, theirs = socket.socketpair()
    channel = ControlChannel(ours, peer_s)
    with theirs:
        process = spawn_on(theirs, words, env, output)
    return process, channel


def spawn_on(
    end: socket.socket, words: Sequence[str], env: Mapping[str, str], output: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start ``python -m WORDS FD PARENT`` as a child, with ``end`` as its end of a control channel.

    The caller closes its own copy of ``end``. Neither the child nor a Python process that it starts imports from
    the working directory, where anybody may have put a module.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *words, str(end.fileno()), str(os.getpid())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**env, **SAFE_PATH},
        start_new_session=True,
    )


def channel_to_parent(descriptor: str, parent: str) -> ControlChannel:
    """Return the control channel to the parent, in the child process.

    ``descriptor`` and ``parent``: FD and PARENT, the last two arguments of the child's command line.
    """
    die_with_parent()
    if os.getppid() != int(parent):  # the parent died before the line above
        os._exit(1)
    collect_rarely()
    os.set_inheritable(int(descriptor), False)
    return ControlChannel(socket.socket(fileno=int(descriptor)))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
