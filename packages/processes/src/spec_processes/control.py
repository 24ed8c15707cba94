"""A ControlChannel carries JSON messages between two processes, over a socket that only they hold.

If one process dies, the kernel closes its socket, and the other process reads the end of the stream. Messages
never contain tensors.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from spec_core import Message
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_processes.sockets.framed_socket import FramedSocket, peer_errors

BEATS_PER_TIMEOUT = 8
"""Number of heartbeats that a process sends within the time of silence after which it counts as lost."""
_MAX_BYTES = 1 << 30
_CLOSED = "the control channel is closed"


class ControlChannel:
    """One process's side of a channel. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket, send_timeout_s: float | None = None) -> None:
        """Take ownership of the socket ``end``.

        ``send_timeout_s``: longest wait in seconds for the other process to read; None waits without limit.
        """
        self._socket = FramedSocket(end, _MAX_BYTES)
        self._closed = threading.Event()
        self._send_timeout_s = send_timeout_s
        self.wait: Callable[[float | None], None] | None = None
        """Function that ``send`` calls, with the longest wait in seconds, when the other process does not
        read. If it is None, ``send`` blocks instead."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message with the field ``kind`` and the given further fields.

        Raise PeerLost if the other process is gone, DeadlineExceeded if it does not read.
        """
        limit_s = self._send_timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        packet = json.dumps({"kind": kind, **fields}).encode()
        with peer_errors(f"the control channel was not read within {limit_s} s", _CLOSED):
            self._socket.send(packet, deadline, wait=self.wait)

    def keep_alive(self, peer_s: float) -> None:
        """Start a thread that sends heartbeats; a stopped process (SIGSTOP) sends none.

        Call it before heavy imports, so that a slow start is not mistaken for silence.
        """
        pause_s = peer_s / BEATS_PER_TIMEOUT
        threading.Thread(target=self._beat, args=(pause_s,), name="heartbeat", daemon=True).start()

    def messages(self) -> Iterator[Message]:
        """Wait for each message and yield it, until the other process has closed its end or died."""
        while True:
            try:
                packet = self._socket.receive()
            except (OSError, ProtocolError):
                return
            yield json.loads(packet)

    def arrived(self) -> list[Message]:
        """Return the messages that have arrived, without waiting. Raise PeerLost if the channel has ended."""
        try:
            return [json.loads(packet.decode()) for packet in self._socket.arrived()]
        except (OSError, ProtocolError) as error:
            raise PeerLost(f"{_CLOSED}: {error}") from error

    def fileno(self) -> int:
        """Return the socket's file descriptor, for ``selectors``."""
        return self._socket.end.fileno()

    def close(self) -> None:
        """Close this side of the channel, which also ends ``messages`` in another thread."""
        self._closed.set()
        self._socket.shutdown()
        self._socket.close()

    def _beat(self, pause_s: float) -> None:
        with suppress(PeerLost, DeadlineExceeded):
            while not self._closed.wait(pause_s):
                self.send("alive")
