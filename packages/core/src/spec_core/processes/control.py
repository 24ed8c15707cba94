"""ControlChannel: small JSON records between the launcher and one child, over an inherited socket pair.

No port and no token: only the two processes ever hold an end. When either dies the kernel closes its end, and the
other reads the end of the stream. Records never carry tensors.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_core.framed_socket import FramedSocket

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

Record = dict[str, Any]

MAX_RECORD_BYTES = 1 << 30
BEATS_PER_TIMEOUT = 8
"""Number of heartbeats within the silence after which a process counts as lost."""


class ControlChannel:
    """``send`` may be called from any thread; ``records`` from one."""

    def __init__(self, end: socket.socket, send_timeout_s: float | None = None) -> None:
        self._channel = FramedSocket(end, MAX_RECORD_BYTES)
        self._closed = threading.Event()
        self._send_timeout_s = send_timeout_s

    def send(self, kind: str, **fields: Any) -> None:
        """Send a record. Raise PeerLost if the other process is gone, DeadlineExceeded if it does not read."""
        limit_s = self._send_timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            self._channel.send(json.dumps({"kind": kind, **fields}).encode(), deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the control channel was not read within {limit_s} s") from error
        except OSError as error:
            raise PeerLost(f"the control channel is closed: {error}") from error

    def keep_alive(self, peer_s: float) -> None:
        """Send heartbeats from now on: a process that was stopped goes silent, though it exists.

        Call it before anything heavy is imported, so that a slow start is no silence.
        """
        pause_s = peer_s / BEATS_PER_TIMEOUT
        threading.Thread(target=self._beat, args=(pause_s,), name="heartbeat", daemon=True).start()

    def records(self) -> Iterator[Record]:
        """Yield each record, blocking; end when the other process has closed its end or died."""
        with suppress(OSError, ProtocolError):
            while True:
                yield json.loads(self._channel.receive())

    def close(self) -> None:
        """Close this end, and end a ``records`` that another thread waits in."""
        self._closed.set()
        self._channel.shutdown()
        self._channel.close()

    def _beat(self, pause_s: float) -> None:
        with suppress(PeerLost, DeadlineExceeded):
            while not self._closed.wait(pause_s):
                self.send("alive")
