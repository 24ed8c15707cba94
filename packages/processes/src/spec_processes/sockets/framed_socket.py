"""FramedSocket: packets over a stream socket, each preceded by its length. All connections of this project use it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_processes.sockets.local_socket import limit_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

LENGTH = struct.Struct("!I")
"""Number of bytes of the packet that follows."""
SILENCE_S = 20
"""Seconds after which a host that answers nothing at all, not even TCP's probes, counts as dead."""
_CHUNK_BYTES = 1 << 16


class FramedSocket:
    """One thread receives; any thread may send.

    Deadlines are times of ``time.monotonic``; None waits without limit. Calls raise TimeoutError at their deadline
    and another OSError once the connection has ended.
    """

    def __init__(self, end: socket.socket, max_bytes: int) -> None:
        """Own ``end``. A packet of more than ``max_bytes`` is refused before memory is taken for it."""
        end.settimeout(None)
        self.end, self._max_bytes = end, max_bytes
        self._sending = threading.Lock()
        self._received = bytearray()
        self._limits_s: dict[int, float] = {}
        """Longest waits that the kernel knows of, by direction."""

    def send(
        self,
        packet: bytes,
        deadline: float | None = None,
        descriptor: int | None = None,
        wait: Callable[[float | None], None] | None = None,
    ) -> None:
        """Send one packet, over a Unix socket with a file descriptor if one is given.

        ``wait`` is called, with the seconds until the deadline, in place of waiting here for the peer to read.
        """
        if not self._sending.acquire(timeout=-1 if deadline is None else _left(deadline)):
            raise TimeoutError("another thread is sending")
        try:
            self._send_all(LENGTH.pack(len(packet)) + packet, descriptor, deadline, wait)
        finally:
            self._sending.release()

    def receive(self, deadline: float | None = None, descriptors: list[int] | None = None) -> bytes:
        """Return the next packet. Raise ProtocolError for an empty one or one that is too large.

        File descriptors that come before its end are added to ``descriptors``, also where the call raises.
        """
        while (packet := self._next_packet()) is None:
            self._limit_wait(socket.SO_RCVTIMEO, deadline)
            try:
                if descriptors is None:
                    chunk = self.end.recv(_CHUNK_BYTES)
                else:
                    chunk, received, _, _ = socket.recv_fds(self.end, _CHUNK_BYTES, 1)
                    descriptors += received
            except BlockingIOError as error:
                if not _is_over(deadline):
                    continue
                raise TimeoutError("the peer sent nothing") from error
            except TimeoutError as error:  # the connection's, not the call's
                raise _dead_host() from error
            if not chunk:
                raise ConnectionResetError("the peer has closed the connection")
            self._received += chunk
        return packet

    def arrived(self) -> list[bytes]:
        """Read once, without waiting, and return the packets that are whole; raises as ``receive`` does."""
        try:
            chunk = self.end.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not chunk:
            raise ConnectionResetError("the peer has closed the connection")
        self._received += chunk
        return list(iter(self._next_packet, None))

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """End the connection and wake a thread that waits in it; any thread may call it."""
        with contextlib.suppress(OSError):
            self.end.shutdown(how)

    def close(self) -> None:
        """Give the socket back. No other thread may be in a call any more."""
        self.end.close()

    def _send_all(
        self,
        data: bytes,
        descriptor: int | None,
        deadline: float | None,
        wait: Callable[[float | None], None] | None,
    ) -> None:
        left = memoryview(data)
        while left:
            self._limit_wait(socket.SO_SNDTIMEO, deadline)
            try:
                if descriptor is None:
                    left = left[self.end.send(left, 0 if wait is None else socket.MSG_DONTWAIT) :]
                else:
                    left = left[socket.send_fds(self.end, [left], [descriptor]) :]
                    descriptor = None
            except BlockingIOError as error:
                if not _is_over(deadline):
                    if wait is not None:
                        wait(None if deadline is None else _left(deadline))
                    continue
                if len(left) < len(data):
                    self.shutdown()  # after half a packet the peer could not make sense of another one
                raise TimeoutError("the peer does not read") from error
            except TimeoutError as error:
                raise _dead_host() from error

    def _next_packet(self) -> bytes | None:
        """Return a packet that has been received whole, or None."""
        if len(self._received) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._received)
        if not 0 < size <= self._max_bytes:
            raise ProtocolError(
                f"a packet of {size} bytes was announced; 1 to {self._max_bytes} bytes are allowed"
            )
        stop = LENGTH.size + size
        if len(self._received) < stop:
            return None
        packet = bytes(self._received[LENGTH.size : stop])
        del self._received[:stop]
        return packet

    def _limit_wait(self, direction: int, deadline: float | None) -> None:
        """Let the kernel wait in one direction for about half of what is left; a longer wait asks again.

        So most calls find a limit that will do, and need not set one.
        """
        left_s = 0.0 if deadline is None else _left(deadline)
        known_s = self._limits_s.get(direction, 0.0)
        if known_s != left_s and not left_s / 8 <= known_s <= left_s:
            self._limits_s[direction] = left_s / 2
            limit_wait(self.end, direction, left_s / 2)


def detect_dead_host(end: socket.socket) -> None:
    """Make a TCP connection end when the other host has been silent for ``SILENCE_S``; send small packets at once."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 4)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


@contextlib.contextmanager
def peer_errors(late: str, gone: str) -> Generator[None]:
    """Raise a socket's errors inside as this project's.

    At a deadline that is DeadlineExceeded with the text "late: cause", else PeerLost with "gone: cause".
    """
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"{late}: {error}") from error
    except OSError as error:
        raise PeerLost(f"{gone}: {error}") from error


def _dead_host() -> OSError:
    return ConnectionAbortedError(f"the other host has not answered for {SILENCE_S} s")


def _left(deadline: float) -> float:
    """Return the seconds until ``deadline``; never 0, which would stand for no limit."""
    return max(1e-3, deadline - time.monotonic())


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
