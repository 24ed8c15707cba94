"""Accept connections of unauthenticated peers at a bounded cost, and compare secret tokens.

Anybody can reach a TCP listener, and every process of this user a Unix socket. The first packet of a
connection has a size limit and a deadline. The number of pending connections, which have not sent this packet,
is limited, too. At the limit a new connection replaces the oldest pending one, so that silent connections cannot
keep out a peer that sends at once.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from spec_processes.sockets import local_socket
from spec_processes.sockets.framed_socket import LENGTH

FIRST_PACKET_S = 10.0
"""Longest time, in seconds, from accepting a connection to the end of its first packet."""
MAX_FIRST_PACKET_BYTES = 8192
"""Largest size of a first packet, in bytes."""
MAX_PENDING = 64
"""Largest number of connections that have not sent their first packet, unless a listener allows more."""


def same_token(claimed: object, token: str) -> bool:
    """Return whether ``claimed``, which a peer has sent, equals the token; compares in constant time."""
    return hmac.compare_digest(str(claimed).encode(errors="replace"), token.encode())


@dataclass(eq=False)
class _Pending:
    socket: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class AcceptLimiter:
    """Accepts connections of listeners, and yields each connection when its first packet has arrived.

    The limiter owns the listeners. Only one thread may iterate over ``first_packets``.
    """

    def __init__(self, *listeners: socket.socket, max_pending: int | None = None) -> None:
        """Take ownership of the listeners; nothing is accepted before ``first_packets``.

        ``max_pending``: largest number of connections that have not sent their first packet; by default MAX_PENDING.
        """
        self._listeners = listeners
        self._max_pending = max_pending
        self._pending: dict[socket.socket, _Pending] = {}  # in the order in which they connected
        self._closed = False
        self._selector: selectors.BaseSelector
        for listener in listeners:
            listener.setblocking(False)

    def first_packets(self) -> Generator[tuple[socket.socket, bytes]]:
        """Yield each connection, blocking, with its first packet, until the limiter is closed.

        The caller closes the connection.
        """
        self._selector = selectors.DefaultSelector()
        try:
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in self._selector.select(self._close_late(time.monotonic())):
                    if key.fileobj in self._listeners:
                        self._accept(key.fileobj)
                    elif (pending := self._pending.get(key.data)) and (packet := self._read(pending)):
                        yield self._remove(pending), packet
        except OSError:  # a listener was shut down
            return
        finally:
            for pending in list(self._pending.values()):
                self._remove(pending).close()
            self._selector.close()
            for listener in self._listeners:
                listener.close()

    def close(self) -> None:
        """End the iteration over ``first_packets``; any thread may call this."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes ``first_packets``

    def _accept(self, listener: object) -> None:
        assert isinstance(listener, socket.socket)
        if (connection := local_socket.accept(listener)) is None:
            return
        if len(self._pending) == (self._max_pending or MAX_PENDING):
            self._remove(next(iter(self._pending.values()))).close()
        connection.setblocking(False)
        self._pending[connection] = _Pending(connection, time.monotonic() + FIRST_PACKET_S)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _read(self, pending: _Pending) -> bytes:
        """Return a connection's first packet if it is complete, else no bytes; read nothing after it."""
        head = LENGTH.size
        size = head
        if len(pending.received) >= head:
            size += LENGTH.unpack_from(pending.received)[0]
        try:
            fits = size <= head + MAX_FIRST_PACKET_BYTES
            part = pending.socket.recv(size - len(pending.received)) if fits else b""
        except BlockingIOError:
            return b""
        except OSError:
            part = b""
        pending.received += part
        if not part:
            self._remove(pending).close()
        elif len(pending.received) == size > head:
            return bytes(pending.received[head:])
        return b""

    def _close_late(self, now: float) -> float | None:
        """Close connections whose deadline has passed; return the seconds until the next deadline, or None."""
        for pending in list(self._pending.values()):
            if pending.deadline > now:
                return pending.deadline - now
            self._remove(pending).close()
        return None

    def _remove(self, pending: _Pending) -> socket.socket:
        del self._pending[pending.socket]
        self._selector.unregister(pending.socket)
        with contextlib.suppress(OSError):
            pending.socket.setblocking(True)
        return pending.socket
