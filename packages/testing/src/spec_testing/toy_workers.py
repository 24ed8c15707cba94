"""This module has the entry functions of LauncherSuite's workers; it does not import torch."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_core import RunLink
from spec_core.errors import PeerLost

LONG_S = 600.0


def echo(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Send a description of this worker's process, then send every message back to the run.

    When the run ends, write the error that ``send`` raises into the file ``arguments["ending"]``.
    """
    link.send(
        {
            "pid": os.getpid(),
            "niceness": os.nice(0),
            "in_main_thread": threading.current_thread() is threading.main_thread(),
            "environment": {name: os.environ.get(name) for name in arguments.get("variables", ())},
            "arguments": dict(arguments),
        }
    )
    print("a line of output", flush=True)
    while (message := link.receive()) is not None:
        link.send(message)
    if "ending" in arguments:
        try:
            link.send({})
        except PeerLost as error:
            Path(arguments["ending"]).write_text(type(error).__name__)


def count_and_end(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Send 100 numbers, then end in the way that ``arguments["how"]`` names."""
    for number in range(100):
        link.send({"number": number})
    if arguments["how"] == "raise":
        raise ValueError("as the suite asked for")
    if arguments["how"] == "exit":
        os._exit(3)
    if arguments["how"] in ("SIGABRT", "SIGKILL"):
        os.kill(os.getpid(), signal.Signals[arguments["how"]])
        time.sleep(LONG_S)


def stubborn(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Start a process that ignores SIGTERM; read nothing and do not end."""
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; sleep 600"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    link.send({"pids": [os.getpid(), child.pid]})
    time.sleep(LONG_S)


def leave_pid(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Write this worker's process id into ``arguments["file"]`` and do not end."""
    Path(arguments["file"]).write_text(str(os.getpid()))
    time.sleep(LONG_S)


def listen_for_peer(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Listen on a free port of this worker's address, and receive bytes from one connection.

    The worker sends its address and port over ``link``, and later the bytes.
    """
    with socket.create_server((link.address, 0)) as server:
        link.send({"address": link.address, "port": server.getsockname()[1]})
        connection, _ = server.accept()
        with connection:
            link.send({"received": connection.recv(100).decode()})


def connect_to_peer(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Connect to the worker whose address is in the first message, and send some bytes to it."""
    where = link.receive()
    assert where is not None
    with socket.create_connection((where["address"], where["port"])) as connection:
        connection.sendall(b"a word")


def close_everything(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Close every descriptor and do not end, like a process that hangs inside a driver while it dies."""
    os.closerange(3, 100)
    time.sleep(LONG_S)


def hold_interpreter(link: RunLink, arguments: Mapping[str, Any]) -> None:
    """Sleep in foreign code that does not give the interpreter's lock back, so that no other thread runs."""
    link.send({"pid": os.getpid()})
    ctypes.PyDLL(None).sleep(int(LONG_S))
