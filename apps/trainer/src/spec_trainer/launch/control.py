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

from spec_core.errors import PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

Record = dict[str, Any]

_LENGTH = struct.Struct("!I")


class ControlChannel:
    """``send`` may be called from any thread; ``records`` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        """Raises PeerLost if the other process is gone."""
        payload = json.dumps({"kind": kind, **fields}).encode()
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise PeerLost(f"the control channel is closed: {error}") from error

    def records(self) -> Iterator[Record]:
        """Blocks for each record; ends when the other process has closed its end or died."""
        while (head := self._read(_LENGTH.size)) is not None:
            payload = self._read(_LENGTH.unpack(head)[0])
            if payload is None:
                return
            yield json.loads(payload)

    def close(self) -> None:
        """Also ends a ``records`` that another thread waits in."""
        with suppress(OSError):  # the other end went first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

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
