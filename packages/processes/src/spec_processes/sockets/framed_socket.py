"""A FramedSocket sends packets over a stream socket, each with its length in front."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_processes.sockets.local_socket import limit_wait

LENGTH = struct.Struct("!I")
"""Header of a packet: its number of bytes, as a big-endian uint32."""
SILENCE_S = 20
"""Seconds after which a host that does not even answer TCP keepalive probes counts as dead."""
_CHUNK_BYTES = 1 << 16


class FramedSocket:
    """Sends and receives packets over a stream socket. One thread receives; any thread may send.

    Deadlines are times of ``time.monotonic``; None waits without limit. Calls raise TimeoutError at their
    deadline, and another OSError if the connection has ended.
    """

    def __init__(self, end: socket.socket, max_bytes: int) -> None:
        """Take ownership of the socket ``end``.

        Larger packets than ``max_bytes`` are refused before they are read.
        """
        end.settimeout(None)
        self.end = end
        self._max_bytes = max_bytes
        self._sending = threading.Lock()
        self._received = bytearray()
        self._limits_s: dict[int, float] = {}
        """Direction (SO_SNDTIMEO, SO_RCVTIMEO) -> timeout in seconds that is set on the socket."""

    def send(
        self,
        packet: bytes,
        deadline: float | None = None,
        descriptor: int | None = None,
        wait: Callable[[float | None], None] | None = None,
    ) -> None:
        """Send one packet and, if given, the file descriptor ``descriptor`` (over a Unix socket only).

        If the peer does not read and ``wait`` is given, ``send`` does not block. It calls ``wait`` with the seconds
        until the deadline, and tries again.
        """
        if not self._sending.acquire(timeout=-1 if deadline is None else _left(deadline)):
            raise TimeoutError("another thread is sending")
        try:
            self._send_all(LENGTH.pack(len(packet)) + packet, descriptor, deadline, wait)
        finally:
            self._sending.release()

    def receive(self, deadline: float | None = None, descriptors: list[int] | None = None) -> bytes:
        """Wait for the next packet and return it. Raise ProtocolError if it is empty or too large.

        File descriptors that arrive with the packet are appended to ``descriptors``, even if the call raises.
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
            except TimeoutError as error:  # the connection timed out, not this call
                raise _dead_host() from error
            if not chunk:
                raise ConnectionResetError("the peer has closed the connection")
            self._received += chunk
        return packet

    def arrived(self) -> list[bytes]:
        """Read once, without waiting, and return the packets that are complete.

        Raise ProtocolError for an empty or too large packet, and OSError if the peer has gone.
        """
        try:
            chunk = self.end.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not chunk:
            raise ConnectionResetError("the peer has closed the connection")
        self._received += chunk
        return list(iter(self._next_packet, None))

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the connection down and wake threads that wait for it; any thread may call it."""
        with contextlib.suppress(OSError):
            self.end.shutdown(how)

    def close(self) -> None:
        """Close the socket. No other thread may be in a call of this object."""
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
                    self.shutdown()  # the peer could parse no other packet after half of this one
                raise TimeoutError("the peer does not read") from error
            except TimeoutError as error:
                raise _dead_host() from error

    def _next_packet(self) -> bytes | None:
        """Return the next packet from the buffer if it is complete, else None."""
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
        """Set the socket's timeout for one direction to about half of the time until the deadline.

        A call whose timeout ends before its deadline waits again, so the timeout need not be exact. A timeout
        that an earlier call has set is kept if it is between an eighth and all of the remaining time.
        """
        left_s = 0.0 if deadline is None else _left(deadline)
        known_s = self._limits_s.get(direction, 0.0)
        if known_s != left_s and not left_s / 8 <= known_s <= left_s:
            self._limits_s[direction] = left_s / 2
            limit_wait(self.end, direction, left_s / 2)


def detect_dead_host(end: socket.socket) -> None:
    """Let TCP end the connection after ``SILENCE_S`` of silence, and send small packets at once."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 4)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


@contextlib.contextmanager
def peer_errors(late: str, gone: str) -> Generator[None]:
    """Convert the errors of sockets in the block to errors of this project.

    TimeoutError becomes DeadlineExceeded with the text "late: cause", another OSError PeerLost with "gone:
    cause".
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
    """Return the seconds until ``deadline``; never 0, which would mean no limit."""
    return max(1e-3, deadline - time.monotonic())


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
