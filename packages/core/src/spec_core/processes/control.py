"""ControlChannel: small JSON records between the launcher and one child, over an inherited socket pair.

No port and no token: only the two processes ever hold an end. When either dies the kernel closes its end, and the
other reads the end of the stream. Records never carry tensors.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spec_core import local_socket
from spec_core.errors import DeadlineExceeded, PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

Record = dict[str, Any]

LENGTH = struct.Struct("!I")
"""Bytes of the record that follows."""
BEATS_PER_TIMEOUT = 8
"""How often a process tells that it lives, within the silence after which it counts as lost."""


class ControlChannel:
    """``send`` may be called from any thread; ``records`` from one."""

    def __init__(self, end: socket.socket, send_timeout_s: float | None = None) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._send_timeout_s = send_timeout_s
        if send_timeout_s is not None:
            local_socket.limit_wait(end, socket.SO_SNDTIMEO, send_timeout_s)

    def send(self, kind: str, **fields: Any) -> None:
        """Raises PeerLost if the other process is gone, DeadlineExceeded if it does not read."""
        payload = json.dumps({"kind": kind, **fields}).encode()
        try:
            with self._sending:
                self._socket.sendall(LENGTH.pack(len(payload)) + payload)
        except BlockingIOError as error:
            raise DeadlineExceeded(
                f"the control channel was not read within {self._send_timeout_s} s"
            ) from error
        except OSError as error:
            raise PeerLost(f"the control channel is closed: {error}") from error

    def keep_alive(self, peer_s: float) -> None:
        """Tells the other process from now on that this one runs, not only that it exists: a stopped one goes silent.
        Call it before anything heavy is imported, so that a slow start is no silence."""
        pause_s = peer_s / BEATS_PER_TIMEOUT
        threading.Thread(target=self._beat, args=(pause_s,), name="heartbeat", daemon=True).start()

    def records(self) -> Iterator[Record]:
        """Blocks for each record; ends when the other process has closed its end or died."""
        while (head := self._read(LENGTH.size)) is not None:
            payload = self._read(LENGTH.unpack(head)[0])
            if payload is None:
                return
            yield json.loads(payload)

    def close(self) -> None:
        """Also ends a ``records`` that another thread waits in."""
        self._closed.set()
        with suppress(OSError):  # the other end went first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _beat(self, pause_s: float) -> None:
        with suppress(PeerLost, DeadlineExceeded):
            while not self._closed.wait(pause_s):
                self.send("alive")

    def _read(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            try:
                part = self._socket.recv(size)
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
