"""StreamReceiver is the trainer's side of a feature stream between processes (packets: ``wire``)."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from spec_core import FeatureReceiver
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError
from spec_core.records import FeatureSample, FeatureSchema
from spec_kit.streams.buffer_pool import Block, BufferPoolFactory, ReceiverPool
from spec_kit.streams.window import take_held
from spec_kit.streams.wire import (
    MAX_PACKET_BYTES,
    ConnectReply,
    ConnectRequest,
    Packet,
    PacketKind,
    SampleLayout,
)
from spec_processes.sockets import local_socket
from spec_processes.sockets.addresses import format_address
from spec_processes.sockets.framed_socket import FramedSocket, detect_dead_host
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token

logger = logging.getLogger(__name__)

ADVANCE_S = 1e-3
"""Seconds between the calls of ``ReceiverPool.advance`` while transfers are under way."""


@dataclass(eq=False)
class _Peer:
    """A sender that has been admitted."""

    channel: FramedSocket
    name: str
    pool: ReceiverPool
    closed_cleanly: bool = False
    dead: bool = False
    failure: RunError | None = None
    """Error because of which this receiver ended the connection."""
    granted: dict[int, Block] = field(default_factory=dict["int", "Block"])


@dataclass(frozen=True)
class _Request:
    peer: _Peer
    number: int
    num_tokens: int


@dataclass(frozen=True)
class _Arrival:
    peer: _Peer
    block: Block
    request_id: int


@dataclass(frozen=True)
class _Loss:
    peer: _Peer
    error: RunError


class StreamReceiver(FeatureReceiver):
    """Receiver with one thread that admits senders, and one thread per sender that handles its packets.

    One condition variable guards all state. The address is ``shm:<abstract socket name>:<token>``, followed by
    ``@<host>:<port>`` if there is a port.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        window_bytes: int,
        pools: Sequence[BufferPoolFactory],
        port: socket.socket | None = None,
    ) -> None:
        """Listen; a sender gets the first of ``pools`` that serves its device. ``close`` closes the pools."""
        self._schema = schema
        self._layout = SampleLayout(schema)
        self._window_bytes = window_bytes
        self._used_bytes = 0
        self._pools = pools
        self._token = secrets.token_hex(16)
        self._peers: set[_Peer] = set()
        self._threads: list[threading.Thread] = []
        self._num_admitted = 0
        self._deserted = False
        """Whether all senders have left and ``receive`` has not reported it yet (T7)."""
        self._requests: deque[_Request] = deque()
        self._arrived: deque[_Arrival | _Loss] = deque()
        self._held: dict[FeatureSample, _Arrival] = {}
        self._closed = False
        self._changed = threading.Condition()
        listener, self._name = local_socket.listen("spec")
        self._where = "" if port is None else "@" + format_address(*port.getsockname()[:2])
        self._limiter = AcceptLimiter(listener, *([] if port is None else [port]))
        self._thread = threading.Thread(target=self._admit_all, name=self._name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the address by which a sender connects (T1)."""
        return f"shm:{self._name}:{self._token}{self._where}"

    def receive(self, timeout_s: float) -> FeatureSample:
        """Return the next sample of any sender (T3, T6, T7)."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if not self._wait(deadline):
                    raise DeadlineExceeded(f"no sample within {timeout_s} s; {self._situation()}")
                if self._closed:
                    raise ProtocolError("the receiver was closed")
                if not self._arrived:
                    self._deserted = False
                    raise PeerLost(f"every sender of {self._name} has gone")
                arrival = self._arrived.popleft()
                if isinstance(arrival, _Loss):
                    raise arrival.error
                try:
                    return self._read(arrival)
                except RunError as error:
                    self._lose(arrival, error)

    def release(self, sample: FeatureSample) -> None:
        """Free the bytes of a sample for other samples (T4)."""
        with self._changed:
            arrival = take_held(self._held, sample)
            self._used_bytes -= self._layout.sample_bytes(arrival.block.num_tokens)
            arrival.peer.pool.free(arrival.block)
            self._grant_in_order()

    def close(self) -> None:
        """End all connections and close the pools. Idempotent (T9)."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._limiter.close()
        # Without the lock, which the threads need to end.
        self._thread.join()
        with self._changed:
            for peer in self._peers:
                peer.channel.shutdown()
        for thread in self._threads:
            thread.join()
        self._arrived.clear()
        self._held.clear()
        for pool in self._pools:
            pool.close()

    def _wait(self, deadline: float) -> bool:
        """Let pools transfer samples until ``receive`` has something to report; return False at the deadline."""
        while not self._closed:
            busy = [peer.pool.advance(peer.dead) for peer in list(self._peers)]
            if self._has_changed():
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(min(left_s, ADVANCE_S) if any(busy) else left_s)
        return True

    def _has_changed(self) -> bool:
        deserted = self._deserted and not self._peers
        return bool(self._arrived) or deserted

    def _read(self, arrival: _Arrival) -> FeatureSample:
        """Return a sample. Raise RunError if it is incomplete, such as PeerLost if its sender died (T7)."""
        peer, block = arrival.peer, arrival.block
        if peer.dead and not peer.pool.is_written(block):
            raise PeerLost(f"the sender in {peer.name} died while it sent sample {arrival.request_id}")
        ids, hidden = peer.pool.read(block)
        sample = FeatureSample(request_id=arrival.request_id, input_ids=ids, hidden_TNH=hidden)
        self._held[sample] = arrival
        return sample

    def _lose(self, arrival: _Arrival, error: RunError) -> None:
        """Drop a sample that cannot be read, and end its sender's connection; ``receive`` reports it (T7).

        If the sender has ended already, drop its other samples, too, and raise the error.
        """
        self._give_up(arrival, error)
        if arrival.peer in self._peers:
            return
        for entry in [entry for entry in self._arrived if entry.peer is arrival.peer]:
            self._arrived.remove(entry)
            if isinstance(entry, _Arrival):
                self._give_up(entry, error)
        raise error

    def _situation(self) -> str:
        """Return an explanation, for the error message, why no sample has arrived."""
        if late := sorted(peer.name for peer in self._peers if peer.granted):
            return f"room was given to {', '.join(late)} and was not filled"
        used = f"{self._used_bytes} of {self._window_bytes}"
        return f"senders connected: {self._num_admitted}; {used} bytes are in use"

    def _admit_all(self) -> None:
        """Admit senders until the receiver is closed; runs on a separate thread."""
        for connection, data in self._limiter.first_packets():
            channel = FramedSocket(connection, MAX_PACKET_BYTES)
            name = f"process {local_socket.peer(connection)[0]}" if _is_local(connection) else ""
            try:
                peer = self._greet(channel, name, data)
            except RuntimeError as error:  # also torch's, from a pool; some RunErrors are OSErrors, too
                logger.warning(
                    "%s: refused a connection of %s: %s", self._name, name or "another host", error
                )
                peer = None
            except OSError:  # the sender has gone already
                peer = None
            if peer is None:
                channel.close()
                continue
            thread = threading.Thread(target=self._serve, args=(peer,), name=self._name, daemon=True)
            self._threads = [thread for thread in self._threads if thread.is_alive()] + [thread]
            thread.start()

    def _greet(self, channel: FramedSocket, name: str, data: bytes) -> _Peer | None:
        """Check a sender's first packet, admit the sender and return it.

        Return None if the sender's feature schema differs (T1). Raise ProtocolError if its secret token is wrong.
        """
        request = ConnectRequest.decode(data)
        if not same_token(request.token, self._token):
            refusal = f"the receiver {self._name} does not know this sender's token"
            channel.send(ConnectReply(refusal=refusal).encode())
            raise ProtocolError("its first packet has a wrong token")
        if request.schema != self._schema:
            refusal = f"the sender has {request.schema}, the receiver {self._name} wants {self._schema}"
            channel.send(ConnectReply(refusal=refusal, schema_differs=True).encode())
            return None
        if not name:
            detect_dead_host(channel.end)
        factory = next(pool for pool in self._pools if pool.serves(request.device_id))
        # ``receive`` holds the lock while it reads, and may then wait until this sender has connected to its pool.
        # The sender needs the reply for that, so the reply is sent without the lock, after the sender is counted.
        with self._changed:
            pool = factory.admit(request.device_id, self._on_freed)
            peer = _Peer(channel, name or request.sender, pool)
            self._peers.add(peer)
            self._num_admitted += 1
        reply = ConnectReply(self._window_bytes, pool.size, pool.kind, pool.offer).encode()
        try:
            channel.send(reply, descriptor=pool.descriptor if name else None)
        except OSError:
            with self._changed:
                self._peers.discard(peer)
                self._num_admitted -= 1
                self._changed.notify_all()
            pool.disconnect(lambda: None)
            raise
        return peer

    def _serve(self, peer: _Peer) -> None:
        """Handle one sender's packets, on a separate thread; an invalid packet ends only its connection."""
        loss: RunError | None = None
        try:
            while True:
                data = peer.channel.receive()
                with self._changed:
                    self._handle(peer, Packet.decode(data))
        except ProtocolError as error:
            loss = ProtocolError(f"the sender in {peer.name}: {error}")
        except RuntimeError as error:  # an error here: the pool could not serve that sender
            loss = error if isinstance(error, RunError) else RunError(f"no room for {peer.name}: {error}")
        except OSError:
            loss = peer.failure
            if loss is None and not peer.closed_cleanly:
                loss = PeerLost(f"the sender in {peer.name} has died")
        with self._changed:
            self._disconnect(peer, loss)

    def _handle(self, peer: _Peer, packet: Packet) -> None:
        if packet.kind is PacketKind.REQUEST:
            self._request(_Request(peer, packet.number, packet.value))
        elif packet.kind is PacketKind.DATA:
            peer.pool.fill(self._granted(peer, packet), packet.value, packet.payload)
        elif packet.kind is PacketKind.READY:
            self._ready(peer, packet)
        elif packet.kind is PacketKind.WITHDRAW:
            self._withdraw(peer, packet.number)
        elif packet.kind is PacketKind.CLOSE:
            peer.closed_cleanly = True
        else:
            raise ProtocolError(f"a sender does not send {packet.kind.name}")

    def _request(self, request: _Request) -> None:
        if not 0 <= self._layout.sample_bytes(request.num_tokens) <= self._window_bytes:
            raise ProtocolError(f"it asked for room for {request.num_tokens} tokens")
        self._requests.append(request)
        self._grant_in_order()

    def _on_freed(self) -> None:
        with self._changed:
            if not self._closed:
                self._grant_in_order()

    def _grant_in_order(self) -> None:
        """Grant requests first come, first served, so that small samples cannot starve a large one (T5)."""
        while self._requests:
            request = self._requests[0]
            size = self._layout.sample_bytes(request.num_tokens)
            if self._used_bytes + size > self._window_bytes:
                return
            peer = request.peer
            block = peer.pool.allocate(request.num_tokens)
            # The bytes are there, but not in one piece; the next release tries again.
            if block is None:
                return
            self._requests.popleft()
            self._used_bytes += size
            peer.granted[request.number] = block
            grant = Packet(PacketKind.GRANT, request.number, block.offset, peer.pool.grant_payload(block))
            try:
                # The deadline is now: a sender that does not read must not hold up the others.
                peer.channel.send(grant.encode(), time.monotonic())
            except OSError:  # the sender has died or does not read; ``_serve`` sees the end
                peer.channel.shutdown()

    def _ready(self, peer: _Peer, packet: Packet) -> None:
        block = self._granted(peer, packet)
        # From here on the block is the pool's: the sample may arrive after its sender has ended.
        del peer.granted[packet.number]
        peer.pool.fetch(block, partial(self._arrive, _Arrival(peer, block, packet.value)))
        self._changed.notify_all()

    def _granted(self, peer: _Peer, packet: Packet) -> Block:
        if (block := peer.granted.get(packet.number)) is None:
            raise ProtocolError(f"it filled room {packet.number}, which it was not given")
        return block

    def _arrive(self, arrival: _Arrival, failure: RunError | None) -> None:
        """Queue the sample ``arrival``, or drop it if ``failure`` ended its transfer; the pool calls this."""
        with self._changed:
            if self._closed:
                return
            if failure is None:
                self._arrived.append(arrival)
                self._changed.notify_all()
            else:
                self._give_up(arrival, failure)

    def _give_up(self, arrival: _Arrival, failure: RunError) -> None:
        """Free a sample's memory, and end its sender's connection; ``_serve`` then handles the end."""
        self._reclaim(arrival.peer.pool, arrival.block)
        self._grant_in_order()
        arrival.peer.failure = arrival.peer.failure or failure
        arrival.peer.channel.shutdown()

    def _withdraw(self, peer: _Peer, number: int) -> None:
        block = peer.granted.pop(number, None)
        if block is not None:
            self._reclaim(peer.pool, block)
        self._forget(lambda request: request.peer is peer and request.number == number)

    def _disconnect(self, peer: _Peer, loss: RunError | None) -> None:
        """Free the memory of a sender that is gone (T7). ``receive`` reports the loss after earlier samples."""
        peer.channel.close()
        peer.dead = not peer.closed_cleanly
        for block in peer.granted.values():
            self._reclaim(peer.pool, block)
        peer.granted.clear()
        self._forget(lambda request: request.peer is peer)
        peer.pool.disconnect(partial(self._end, peer, loss))
        self._changed.notify_all()

    def _end(self, peer: _Peer, loss: RunError | None) -> None:
        """Report the end of a sender; called by the pool once earlier samples have arrived or failed."""
        with self._changed:
            self._peers.discard(peer)
            self._deserted = True
            loss = loss or peer.failure
            if loss is not None:
                self._arrived.append(_Loss(peer, loss))
            self._changed.notify_all()

    def _forget(self, ended: Callable[[_Request], bool]) -> None:
        self._requests = deque(request for request in self._requests if not ended(request))
        self._grant_in_order()

    def _reclaim(self, pool: ReceiverPool, block: Block) -> None:
        self._used_bytes -= self._layout.sample_bytes(block.num_tokens)
        pool.reclaim(block)


def _is_local(connection: socket.socket) -> bool:
    return connection.family == socket.AF_UNIX
