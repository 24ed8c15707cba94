"""Notices: what the ranks of a group tell each other on the host before each of them goes to the device.

HCCL learns of a dead peer after minutes and of a silent one never: once a call is on a stream, nobody can take it
back. So a rank first says what it is about to do and waits until its peers have said the same.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_core.lobby import Lobby
from spec_core.rendezvous import bind, format_address, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spec_core.rendezvous import Rendezvous

_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<Q")
"""After the token: the rank."""
_NOTICE = struct.Struct("<16s32sQ")
"""Channel, call, bytes."""


class Notices:
    """A connection to every other rank. One thread uses it; ``close`` may come from another and wakes it."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Collective."""
        self._rank, self._world_size = rendezvous.rank, rendezvous.world_size
        self._heard: dict[tuple[int, bytes], deque[tuple[bytes, int]]] = {}
        self._peers: dict[int, socket.socket] = {}
        self._waiting = threading.Lock()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._connect(rendezvous)
            undo.pop_all()

    def meet(
        self, peers: Iterable[int], channels: tuple[str, str], call: tuple[str, int], timeout_s: float
    ) -> None:
        """Tells ``peers`` of ``call`` (name, bytes) on the first channel and waits for theirs on the second.

        DeadlineExceeded, PeerLost if any rank of the group has gone, ProtocolError if a peer makes another call.
        """
        deadline = time.monotonic() + timeout_s
        awaited = sorted(set(peers) - {self._rank})
        mine, theirs = (channel.encode().ljust(16, b"\0") for channel in channels)
        for peer in awaited:
            self._tell(peer, _NOTICE.pack(mine, call[0].encode(), call[1]))
        for peer in awaited:
            self._expect(peer, theirs, call, deadline)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits, here and at the peer
        with self._waiting:
            for peer in self._peers.values():
                peer.close()
            self._peers = {}

    def _connect(self, rendezvous: Rendezvous) -> None:
        """Each rank connects to the lower ones and is met by the higher ones; who knows no token is sent away."""
        deadline = time.monotonic() + rendezvous.timeout_s
        with bind(rendezvous.interface, 0) as listener:
            addresses = rendezvous.all_gather_json(format_address(*listener.getsockname()[:2]))
            token = _token(rendezvous)
            for peer in range(self._rank):
                self._peers[peer] = _dial(addresses[peer], token, self._rank, rendezvous.timeout_s)
            visitors = Lobby(listener, _LENGTH).first_records(deadline)
            with contextlib.closing(visitors):
                while missing := set(range(self._rank + 1, self._world_size)) - set(self._peers):
                    visitor = next(visitors, None)
                    if visitor is None:
                        waited = f"rank {self._rank} waited in vain for ranks {sorted(missing)}"
                        raise DeadlineExceeded(waited)
                    self._admit(*visitor, token, rendezvous.timeout_s)

    def _admit(self, connection: socket.socket, hello: bytes, token: bytes, timeout_s: float) -> None:
        known = len(hello) == len(token) + _HELLO.size and hmac.compare_digest(hello[: len(token)], token)
        (rank,) = _HELLO.unpack(hello[len(token) :]) if known else (-1,)
        if self._rank < rank < self._world_size and rank not in self._peers:
            connection.settimeout(timeout_s)
            self._peers[rank] = connection
        else:
            connection.close()

    def _tell(self, peer: int, notice: bytes) -> None:
        try:
            self._peers[peer].sendall(notice)
        except (KeyError, OSError) as error:
            raise PeerLost(f"rank {self._rank} lost rank {peer}: {error}") from error

    def _expect(self, peer: int, channel: bytes, call: tuple[str, int], deadline: float) -> None:
        queue = self._heard.setdefault((peer, channel), deque())
        while not queue:
            self._listen(peer, deadline)
        name, size = queue.popleft()
        if (name.rstrip(b"\0").decode(), size) != call:
            raise ProtocolError(_difference(self._rank, call, peer, (name, size)))

    def _listen(self, awaited: int, deadline: float) -> None:
        """Takes in whatever any rank says next: the end of one is everybody's."""
        with self._waiting, selectors.DefaultSelector() as selector:
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            if awaited not in self._peers:
                raise PeerLost(f"rank {self._rank}: the group was closed")
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DeadlineExceeded(f"rank {self._rank} waited in vain for rank {awaited}")
            for key, _ in ready:
                self._take_in(key.data)

    def _take_in(self, rank: int) -> None:
        try:
            channel, name, size = _NOTICE.unpack(_read(self._peers[rank], _NOTICE.size))
        except OSError as error:
            raise PeerLost(f"rank {self._rank} lost rank {rank}: {error}") from error
        self._heard.setdefault((rank, channel), deque()).append((name, size))


def same_device_twice(places: Iterable[str]) -> str:
    """A place that two ranks name, or nothing."""
    return next((place for place, times in Counter(places).items() if times > 1), "")


def _token(rendezvous: Rendezvous) -> bytes:
    return rendezvous.broadcast(secrets.token_bytes(16), src=0)


def _dial(address: str, token: bytes, rank: int, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection(parse_address(address), timeout_s)
    except OSError as error:
        raise PeerLost(f"rank {rank}: nobody listens at {address}: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = token + _HELLO.pack(rank)
    connection.sendall(_LENGTH.pack(len(hello)) + hello)
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes; ConnectionError at the end of the stream."""
    received = connection.recv(size, socket.MSG_WAITALL)
    if len(received) < size:
        raise ConnectionError("the connection has ended")
    return received


def _difference(rank: int, call: tuple[str, int], peer: int, other: tuple[bytes, int]) -> str:
    theirs = other[0].rstrip(b"\0").decode()
    return f"rank {rank} calls {call[0]} of {call[1]} bytes, rank {peer} {theirs} of {other[1]} bytes"
