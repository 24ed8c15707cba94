"""Lobby: where the connections of a listener wait until each has said who it is.

What comes first is a record with its length in front. Until it is there, a connection is a stranger's: it gets so
many bytes, one deadline for all of them, and a place among so many. Who comes when all places are taken gets the
place of whoever has waited longest, so strangers that say nothing keep nobody out who speaks at once.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spec_core import local_socket

if TYPE_CHECKING:
    import struct
    from collections.abc import Generator

HELLO_S = 10.0
"""For a first record to be there, from its connection on."""
MAX_HELLO_BYTES = 4096
"""What a stranger may make a process read."""
MAX_STRANGERS = 64
"""Connections that have not said who they are."""


def same_token(claimed: object, token: str) -> bool:
    """Whether a peer's word is the token, in constant time, whatever it has sent."""
    return hmac.compare_digest(str(claimed).encode(errors="replace"), token.encode())


@dataclass(eq=False)
class _Stranger:
    socket: socket.socket
    deadline: float
    said: bytearray = field(default_factory=bytearray)


class Lobby:
    """Owns the listener. One thread iterates; ``length`` is how the first record's number of bytes is written."""

    def __init__(self, listener: socket.socket, length: struct.Struct) -> None:
        self._listener, self._length = listener, length
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        self._closed = False
        self._selector: selectors.BaseSelector
        listener.setblocking(False)

    def first_records(self, until: float = float("inf")) -> Generator[tuple[socket.socket, bytes]]:
        """Yield each connection, blocking, with its first record; it is then the caller's to close.

        Ends when the lobby is closed, or at ``until`` (``time.monotonic``).
        """
        self._selector = selectors.DefaultSelector()
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed and (now := time.monotonic()) < until:
                self._dismiss_late(now)
                for key, _ in self._selector.select(self._patience(now, until)):
                    if key.fileobj is self._listener:
                        self._admit()
                    elif (stranger := self._strangers.get(key.data)) and (record := self._hear(stranger)):
                        yield self._leave(stranger), record
        except OSError:  # of the listener: it was shut down
            return
        finally:
            for stranger in list(self._strangers.values()):
                self._leave(stranger).close()
            self._selector.close()
            self._listener.close()

    def close(self) -> None:
        """Ends the iteration; any thread may call it."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes it

    def _patience(self, now: float, until: float) -> float | None:
        """Seconds until something is to be done though nobody speaks."""
        eldest = next(iter(self._strangers.values()), None)
        next_s = until if eldest is None else min(until, eldest.deadline)
        return None if next_s == float("inf") else max(0.0, next_s - now)

    def _admit(self) -> None:
        if (connection := local_socket.accept(self._listener)) is None:
            return
        if len(self._strangers) == MAX_STRANGERS:
            self._leave(next(iter(self._strangers.values()))).close()
        connection.setblocking(False)
        self._strangers[connection] = _Stranger(connection, time.monotonic() + HELLO_S)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _hear(self, stranger: _Stranger) -> bytes:
        """The record, once it is whole; nothing of what follows it is read."""
        head = self._length.size
        size = head
        if len(stranger.said) >= head:
            size += self._length.unpack_from(stranger.said)[0]
        try:
            part = stranger.socket.recv(size - len(stranger.said)) if size <= head + MAX_HELLO_BYTES else b""
        except BlockingIOError:
            return b""
        except OSError:
            part = b""
        stranger.said += part
        if not part:
            self._leave(stranger).close()
        elif len(stranger.said) == size > head:
            return bytes(stranger.said[head:])
        return b""

    def _dismiss_late(self, now: float) -> None:
        for stranger in list(self._strangers.values()):
            if stranger.deadline > now:
                return
            self._leave(stranger).close()

    def _leave(self, stranger: _Stranger) -> socket.socket:
        del self._strangers[stranger.socket]
        self._selector.unregister(stranger.socket)
        with contextlib.suppress(OSError):
            stranger.socket.setblocking(True)
        return stranger.socket
