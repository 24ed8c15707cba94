"""ChannelListener: the port at which workers on other hosts reach their launcher.

A worker's first packet has the listener's token and the worker's name; who does not know the token is refused
(``AcceptLimiter`` bounds what that costs). What follows travels in clear: loopback, or a network that is private.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import socket
import threading

from spec_core.framed_socket import LENGTH, detect_dead_host
from spec_core.peer_admission import AcceptLimiter, same_token
from spec_core.rendezvous import bind, format_address, parse_address

log = logging.getLogger(__name__)


class ChannelListener:
    """Accepts one connection of each worker."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of one interface."""
        listener = bind(host, 0)
        self.address = format_address(host, listener.getsockname()[1])
        self.token = secrets.token_hex(16)
        self._limiter = AcceptLimiter(listener)
        self._arrived: queue.SimpleQueue[tuple[str, socket.socket]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._accept, name="workers", daemon=True)
        self._thread.start()

    def accept(self, timeout_s: float) -> tuple[str, socket.socket] | None:
        """Return name and connection of the next worker, for a ControlChannel; None if there is none in time."""
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Listen no more; connections that ``accept`` has returned stay."""
        self._limiter.close()
        self._thread.join()
        while (left := self.accept(0.0)) is not None:
            left[1].close()

    def _accept(self) -> None:
        for connection, packet in self._limiter.first_packets():
            try:
                token, name = json.loads(packet)
            except ValueError:
                token = name = None
            if same_token(token, self.token):
                detect_dead_host(connection)
                self._arrived.put((str(name), connection))
            else:
                log.debug("refused a connection that does not know the token")
                connection.close()


def connect_channel(address: str, token: str, name: str, timeout_s: float) -> socket.socket:
    """Return a blocking connection to a ChannelListener, for ``spawn_on``. Raise OSError."""
    end = socket.create_connection(parse_address(address), timeout_s)
    packet = json.dumps([token, name]).encode()
    end.sendall(LENGTH.pack(len(packet)) + packet)
    detect_dead_host(end)
    end.settimeout(None)
    return end
