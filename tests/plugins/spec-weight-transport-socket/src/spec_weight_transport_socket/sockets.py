"""Sockets: those of one end of an update, which another thread may close."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from spec_core.errors import DeadlineExceeded, PeerLost

if TYPE_CHECKING:
    from collections.abc import Generator


class Sockets:
    """Every call ends at its deadline with DeadlineExceeded, and with PeerLost once ``close`` was called."""

    def __init__(self) -> None:
        self._all: list[socket.socket] = []
        self._using = threading.Lock()
        self._closed = threading.Event()

    def listen(self, host: str) -> socket.socket:
        with self._use() as all_sockets:
            all_sockets.append(socket.create_server((host, 0)))
            return all_sockets[-1]

    def connect(self, host: str, port: int, deadline: float) -> socket.socket:
        with self._use() as all_sockets:
            all_sockets.append(socket.create_connection((host, port), timeout=left(deadline)))
            return all_sockets[-1]

    def accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        with self._use() as all_sockets:
            listener.settimeout(left(deadline))
            all_sockets.append(listener.accept()[0])
            return all_sockets[-1]

    def read(self, end: socket.socket, room: memoryview, deadline: float) -> None:
        """W4: fill ``room``."""
        with self._use():
            while room:
                end.settimeout(left(deadline))
                if not (count := end.recv_into(room)):
                    raise ConnectionResetError("the connection was closed")
                room = room[count:]

    def write(self, end: socket.socket, data: bytes | memoryview, deadline: float) -> None:
        with self._use():
            end.settimeout(left(deadline))
            end.sendall(data)

    def close(self) -> None:
        """W5: wake the thread that uses a socket, wait until it has left, and close all of them."""
        self._closed.set()
        for end in self._all.copy():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._using:
            for end in self._all:
                end.close()

    @contextmanager
    def _use(self) -> Generator[list[socket.socket]]:
        """W4: what a socket raises, as the contract's errors."""
        try:
            with self._using:
                if self._closed.is_set():
                    raise ConnectionAbortedError("this end was closed")
                yield self._all
        except TimeoutError as error:
            raise DeadlineExceeded("the other end was not ready at the deadline") from error
        except OSError as error:
            raise PeerLost(f"the connection has ended or cannot be made: {error}") from error


def left(deadline: float) -> float:
    """Return the seconds that are left; never 0, which would stand for no waiting at all."""
    return max(1e-3, deadline - time.monotonic())
