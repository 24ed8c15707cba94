"""A RendezvousServer admits the members of a Rendezvous and forwards their records to each other.

Rank 0 runs the server. The server does not interpret calls. It records which ranks have joined or left, and the
values in the members' store. One thread admits members. Two threads per member receive and send, so that a member
that does not read delays nobody.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spec_core import foreign_errors
from spec_core.errors import ProtocolError
from spec_core.wire_record import WireRecord
from spec_processes.sockets.framed_socket import FramedSocket, detect_dead_host
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token

logger = logging.getLogger(__name__)

VERSION = 1
MAX_RECORD_BYTES = 64 << 20
"""Largest payload of a record, in bytes. Tensors travel in process groups and transports instead."""
FLUSH_S = 1.0
"""Longest time, in seconds, that ``close`` waits for members that do not read."""

LOST, REFUSED, JOIN, STORE = "lost", "refused", "join", "store"


@dataclass(frozen=True)
class Frame:
    """A record that a member and the server exchange.

    ``rank``: the member that sent the record or, in a LOST record, the member that has left.
    """

    call: str
    number: int
    rank: int
    payload: bytes = b""

    HEADER = struct.Struct("<iQ16s")
    """Header of a frame: rank, number of the call, name of the call."""

    def encode(self) -> bytes:
        """Return this record, encoded as a packet."""
        return self.HEADER.pack(self.rank, self.number, self.call.encode()) + self.payload

    @classmethod
    def decode(cls, packet: bytes) -> Frame:
        """Return the record that a packet encodes. Raise ProtocolError if the packet is too short."""
        if len(packet) < cls.HEADER.size:
            raise ProtocolError(f"a packet of {len(packet)} bytes is no record")
        rank, number, call = cls.HEADER.unpack_from(packet)
        return cls(call.rstrip(b"\0").decode("ascii", "replace"), number, rank, packet[cls.HEADER.size :])


MAX_PACKET_BYTES = MAX_RECORD_BYTES + Frame.HEADER.size


class JoinRequest(WireRecord):
    """Payload of a connection's first record (R2, R3)."""

    version: int
    token: str
    rank: int
    world_size: int


class StoreRequest(WireRecord):
    """Payload of a STORE record, a request to the members' store. Values are bytes, decoded as latin-1."""

    act: Literal["set", "get", "add"]
    key: str
    value: str = ""

    def apply(self, values: dict[str, str]) -> str | None:
        """Apply the request to the store's values; return the key's value afterwards, or None."""
        if self.act == "set":
            values[self.key] = self.value
        elif self.act == "add":
            with foreign_errors(ProtocolError, f"{self.key} of the store is no number to add to"):
                values[self.key] = str(int(values.get(self.key, "0")) + int(self.value))
        return values.get(self.key)


class _Member:
    """The server's connection to a rank that has joined."""

    def __init__(self, rank: int, channel: FramedSocket) -> None:
        self._rank = rank
        self._channel = channel
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, forward: Callable[[int, Frame], None], forget: Callable[[int], None]) -> None:
        for name, work in ("receive", lambda: self._receive_all(forward, forget)), ("send", self._send_all):
            thread = threading.Thread(target=work, name=f"rendezvous {name} {self._rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def post(self, packet: bytes) -> None:
        self._outgoing.put(packet)

    def finish(self) -> None:
        """Send the packets that have been posted; accept no further packets."""
        self._outgoing.put(None)

    def close(self, deadline: float) -> None:
        """Close the connection when all posted packets have been sent, or at ``deadline``."""
        receiving, sending = self._threads
        sending.join(max(0.0, deadline - time.monotonic()))
        self._channel.shutdown()
        receiving.join()
        sending.join()
        self._channel.close()

    def _receive_all(self, forward: Callable[[int, Frame], None], forget: Callable[[int], None]) -> None:
        try:
            while True:
                forward(self._rank, Frame.decode(self._channel.receive()))
        except (ProtocolError, OSError) as error:
            logger.debug("rendezvous: connection of rank %d ended: %s", self._rank, error)
        self._channel.shutdown()
        self._outgoing.put(None)
        forget(self._rank)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (packet := self._outgoing.get()) is not None:
                self._channel.send(packet)


class RendezvousServer:
    """Serves one group of a rendezvous until ``close``."""

    def __init__(self, listener: socket.socket, token: str, world_size: int) -> None:
        """Take ownership of the listener and begin to admit members."""
        self._token = token
        self._world_size = world_size
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._gone: dict[int, _Member] = {}
        self._values: dict[str, str] = {}
        """Key -> value of the members' store."""
        self._closed = False
        self._limiter = AcceptLimiter(listener)
        self._thread = threading.Thread(target=self._accept, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the group, after members had FLUSH_S seconds to read the records of the last call."""
        self._limiter.close()
        self._thread.join()
        with self._lock:
            self._closed = True
            members = [*self._members.values(), *self._gone.values()]
            for member in members:
                member.finish()
        deadline = time.monotonic() + FLUSH_S
        for member in members:
            member.close(deadline)

    def _accept(self) -> None:
        for connection, packet in self._limiter.first_packets():
            channel = FramedSocket(connection, MAX_PACKET_BYTES)
            detect_dead_host(connection)
            try:
                rank = self._rank_of(channel, packet)
            except (ProtocolError, OSError) as error:
                logger.debug("rendezvous: refused a connection: %s", error)
                channel.close()
            else:
                self._admit(rank, channel)

    def _rank_of(self, channel: FramedSocket, packet: bytes) -> int:
        """Return the rank of the peer if it may join.

        Otherwise send the peer the reason and raise ProtocolError.
        """
        request = JoinRequest.decode(Frame.decode(packet).payload)
        if objection := self._objection(request):
            channel.send(Frame(REFUSED, 0, 0, objection.encode()).encode())
            raise ProtocolError(objection)
        return request.rank

    def _objection(self, request: JoinRequest) -> str:
        """Return why the peer cannot be a member (R2, R3); empty if it can."""
        if not same_token(request.token, self._token):
            return "it does not know the group's token"
        if request.version != VERSION:
            return f"it speaks version {request.version}, this group version {VERSION}"
        if request.world_size != self._world_size:
            return f"it expects {request.world_size} ranks, this group has {self._world_size}"
        if not 0 <= request.rank < self._world_size:
            return f"rank {request.rank} is outside 0..{self._world_size - 1}"
        if request.rank in self._members or request.rank in self._gone:
            return f"rank {request.rank} has joined already"
        return ""

    def _admit(self, rank: int, channel: FramedSocket) -> None:
        """Send the new member the ranks that have joined and left, and announce it to all members."""
        member = _Member(rank, channel)
        with self._lock:
            for other in (*self._members, *self._gone):
                member.post(Frame(JOIN, 0, other).encode())
            for other in self._gone:
                member.post(Frame(LOST, 0, other).encode())
            self._members[rank] = member
            self._send_to_all(rank, Frame(JOIN, 0, rank))
            complete = len(self._members) + len(self._gone) == self._world_size
        member.start(self._forward, self._forget)
        if complete:
            self._limiter.close()  # all members have joined

    def _forward(self, rank: int, frame: Frame) -> None:
        with self._lock:
            if self._closed:
                return
            if frame.call == STORE:
                answer = StoreRequest.decode(frame.payload).apply(self._values)
                self._members[rank].post(Frame(STORE, 0, rank, json.dumps(answer).encode()).encode())
            else:
                self._send_to_all(rank, frame)

    def _send_to_all(self, rank: int, frame: Frame) -> None:
        """Post ``frame`` to all members.

        The sender gets the frame back without the payload. This confirms that the other members will get the
        frame, even if the sender dies next.
        """
        receipt = Frame(frame.call, frame.number, rank).encode()
        record = receipt + frame.payload
        for other, member in self._members.items():
            member.post(receipt if other == rank else record)

    def _forget(self, rank: int) -> None:
        with self._lock:
            if not self._closed:
                self._gone[rank] = self._members.pop(rank)
                self._send_to_all(rank, Frame(LOST, 0, rank))
