"""The trainer's end of SharedMemoryTransport. ``shared_memory_wire`` draws the conversation."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spec_core import local_socket
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError
from spec_core.lobby import same_token
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.streams.shared_memory_wire import (
    MAX_PACKET_BYTES,
    Kind,
    Layout,
    Record,
    Welcome,
    decode,
    decode_hello,
    encode_json,
)
from spec_core.transport import FeatureReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spec_core.streams.block_memory import Block, MemoryProvider, ReceiverMemory

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Peer:
    """A connection; a sender once it has been welcomed."""

    socket: socket.socket
    name: str
    memory: ReceiverMemory | None = None
    """Where it writes; None until it has been welcomed."""
    farewell: bool = False
    dead: bool = False
    failure: RunError | None = None
    """Why this end has given it up."""
    granted: dict[int, Block] = field(default_factory=dict["int", "Block"])


@dataclass(frozen=True)
class _Request:
    peer: _Peer
    memory: ReceiverMemory
    number: int
    num_tokens: int


@dataclass(frozen=True)
class _Arrival:
    peer: _Peer
    memory: ReceiverMemory
    block: Block
    request_id: int


@dataclass(frozen=True)
class _Loss:
    peer: _Peer
    error: RunError


class SharedMemoryReceiver(FeatureReceiver):
    """One thread listens to all senders; one condition guards all state."""

    def __init__(self, schema: FeatureSchema, window_bytes: int, memories: Sequence[MemoryProvider]) -> None:
        """Owns ``memories``; a sender gets the first that serves its place."""
        self._schema, self._layout = schema, Layout(schema)
        self._window_bytes = window_bytes
        self._used_bytes = 0
        self._memories = memories
        self._token = secrets.token_hex(16)
        self._peers: set[_Peer] = set()
        self._count = 0
        self._requests: deque[_Request] = deque()
        self._arrived: deque[_Arrival | _Loss] = deque()
        self._held: dict[int, tuple[FeatureSample, _Arrival]] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._listener, self._name = local_socket.listen("spec", socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"shm:{self._name}:{self._token}"

    def receive(self, timeout_s: float) -> FeatureSample:
        with self._changed:
            if not self._changed.wait_for(self._something_to_say, timeout_s):
                raise DeadlineExceeded(f"no sample within {timeout_s} s; {self._situation()}")
            if self._closed:
                raise ProtocolError("the receiver was closed")
            if not self._arrived:
                raise PeerLost(f"every sender of {self._name} has gone")
            arrival = self._arrived.popleft()
            if isinstance(arrival, _Loss):
                raise arrival.error
            self._check_written(arrival)
            ids, hidden = arrival.memory.read(arrival.block)
            sample = FeatureSample(request_id=arrival.request_id, input_ids=ids, hidden_TNH=hidden)
            self._held[id(sample)] = (sample, arrival)
            return sample

    def release(self, sample: FeatureSample) -> None:
        with self._changed:
            held = self._held.pop(id(sample), None)
            if held is None:
                raise ProtocolError(
                    f"sample {sample.request_id} is not held: released twice or never received"
                )
            arrival = held[1]
            self._used_bytes -= self._layout.sample_bytes(arrival.block.num_tokens)
            arrival.memory.free(arrival.block)
            self._grant_in_turn()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._waker.send(b"\0")
        self._thread.join()
        for end in (self._waker, self._woken, self._listener, *(peer.socket for peer in self._peers)):
            end.close()
        self._arrived.clear()
        self._held.clear()
        for memory in self._memories:
            memory.close()

    def _something_to_say(self) -> bool:
        deserted = self._count > 0 and not any(peer.memory for peer in self._peers)
        return self._closed or bool(self._arrived) or deserted

    def _check_written(self, arrival: _Arrival) -> None:
        """T7: a sender may have died before its device came to the sample that it had announced. What it announced
        later is lost as well, and one error tells of all."""
        peer = arrival.peer
        if not peer.dead or arrival.memory.is_written(arrival.block):
            return
        later = [entry for entry in self._arrived if entry.peer is peer]
        self._arrived = deque(entry for entry in self._arrived if entry.peer is not peer)
        for entry in (arrival, *later):
            if isinstance(entry, _Arrival):
                self._reclaim(entry.memory, entry.block)
        self._grant_in_turn()
        raise PeerLost(f"the sender in {peer.name} died while it sent sample {arrival.request_id}")

    def _situation(self) -> str:
        """Who is to blame for the silence."""
        late = sorted(peer.name for peer in self._peers if peer.granted)
        if late:
            return f"room was given to {', '.join(late)} and was not filled"
        return f"{self._count} senders have connected, {self._used_bytes} of {self._window_bytes} bytes are in use"

    def _serve(self) -> None:
        """The thread: listens until it is woken."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    action: Callable[[selectors.BaseSelector], None] = key.data
                    with self._changed:
                        action(selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        if (connection := local_socket.accept(self._listener)) is None:
            return
        connection.setblocking(False)
        peer = _Peer(connection, f"process {local_socket.peer(connection)[0]}")
        self._peers.add(peer)
        selector.register(connection, selectors.EVENT_READ, partial(self._hear, peer))

    def _hear(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        """One packet of a peer; what it may not say ends its connection, and nobody else's."""
        try:
            packet = peer.socket.recv(MAX_PACKET_BYTES)
            if packet:
                self._answer(peer, packet)
                return
            loss = peer.failure
            if loss is None and not peer.farewell:
                loss = PeerLost(f"the sender in {peer.name} has died")
        except ConnectionError:
            return  # it went with a record unread; what it said before, and its end, are still to be read
        except ProtocolError as error:
            loss = ProtocolError(f"the sender in {peer.name}: {error}")
        except RunError as error:  # of this end's: its memory could not serve that sender
            loss = error
        selector.unregister(peer.socket)
        self._dismiss(peer, loss)

    def _answer(self, peer: _Peer, packet: bytes) -> None:
        if peer.memory is None:
            self._greet(peer, packet)
            return
        record = decode(packet)
        if record.kind is Kind.REQUEST:
            self._request(_Request(peer, peer.memory, record.number, record.value))
        elif record.kind is Kind.READY:
            self._ready(peer, peer.memory, record)
        elif record.kind is Kind.WITHDRAW:
            self._withdraw(peer, peer.memory, record.number)
        elif record.kind is Kind.BYE:
            peer.farewell = True
        else:
            raise ProtocolError(f"{record.kind.name} is not for a sender to say")

    def _greet(self, peer: _Peer, packet: bytes) -> None:
        """T1. Raises ProtocolError for anything but a hello with the token."""
        hello = decode_hello(packet)
        if not same_token(hello.token, self._token):
            refusal = f"the receiver {self._name} does not know this sender's token"
            peer.socket.send(encode_json(Welcome(refusal=refusal)))
            raise ProtocolError("its first record has a wrong token")
        if hello.schema != self._schema:
            refusal = f"the sender has {hello.schema}, the receiver {self._name} wants {self._schema}"
            peer.socket.send(encode_json(Welcome(refusal=refusal, schema_differs=True)))
            return
        provider = next(memory for memory in self._memories if memory.serves(hello.place))
        memory = provider.admit(hello.place, self._room)
        welcome = encode_json(Welcome(self._window_bytes, memory.size, memory.kind, memory.offer))
        socket.send_fds(peer.socket, [welcome], [] if memory.descriptor is None else [memory.descriptor])
        peer.memory = memory
        if hello.who and peer.name == f"process {os.getpid()}":
            peer.name = hello.who  # it comes by a relay of this process
        self._count += 1

    def _request(self, request: _Request) -> None:
        if not 0 <= self._layout.sample_bytes(request.num_tokens) <= self._window_bytes:
            raise ProtocolError(f"it asked for room for {request.num_tokens} tokens")
        self._requests.append(request)
        self._grant_in_turn()

    def _room(self) -> None:
        with self._changed:
            if not self._closed:
                self._grant_in_turn()

    def _grant_in_turn(self) -> None:
        """T5: strictly first come, first served, so that a large sample is not passed by small ones for ever."""
        while self._requests:
            request = self._requests[0]
            size = self._layout.sample_bytes(request.num_tokens)
            if self._used_bytes + size > self._window_bytes:
                return
            block = request.memory.allocate(request.num_tokens)
            if block is None:
                return
            self._requests.popleft()
            self._used_bytes += size
            request.peer.granted[request.number] = block
            grant = Record(Kind.GRANT, request.number, block.offset, request.memory.note(block))
            with contextlib.suppress(OSError):  # a peer that has just died is dismissed by ``_hear``
                request.peer.socket.send(grant.encode())

    def _ready(self, peer: _Peer, memory: ReceiverMemory, record: Record) -> None:
        block = peer.granted.pop(record.number, None)
        if block is None:
            raise ProtocolError(f"it filled room {record.number}, which it was not given")
        memory.fetch(block, partial(self._arrive, _Arrival(peer, memory, block, record.value)))

    def _arrive(self, arrival: _Arrival, failure: RunError | None) -> None:
        """By the thread of the memory that has fetched it."""
        with self._changed:
            if self._closed:
                return
            if failure is None:
                self._arrived.append(arrival)
            else:
                self._reclaim(arrival.memory, arrival.block)
                self._grant_in_turn()
                self._give_up(arrival.peer, failure)
            self._changed.notify_all()

    def _give_up(self, peer: _Peer, failure: RunError) -> None:
        """The end of its connection is heard like any other."""
        peer.failure = peer.failure or failure
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)

    def _withdraw(self, peer: _Peer, memory: ReceiverMemory, number: int) -> None:
        block = peer.granted.pop(number, None)
        if block is not None:
            self._reclaim(memory, block)
        self._forget(lambda request: request.peer is peer and request.number == number)

    def _dismiss(self, peer: _Peer, loss: RunError | None) -> None:
        """T7: its room is free again, and ``receive`` reports the loss after what had arrived before."""
        peer.socket.close()
        peer.dead = not peer.farewell
        if peer.memory is None:
            self._peers.discard(peer)
            if loss is not None:
                logger.warning("%s: refused a connection: %s", self._name, loss)
            return
        for block in peer.granted.values():
            self._reclaim(peer.memory, block)
        peer.granted.clear()
        self._forget(lambda request: request.peer is peer)
        peer.memory.part(partial(self._end, peer, loss))

    def _end(self, peer: _Peer, loss: RunError | None) -> None:
        """By the thread of the memory that has fetched what came before."""
        with self._changed:
            self._peers.discard(peer)
            loss = loss or peer.failure
            if loss is not None:
                self._arrived.append(_Loss(peer, loss))
            self._changed.notify_all()

    def _forget(self, ended: Callable[[_Request], bool]) -> None:
        self._requests = deque(request for request in self._requests if not ended(request))
        self._grant_in_turn()

    def _reclaim(self, memory: ReceiverMemory, block: Block) -> None:
        self._used_bytes -= self._layout.sample_bytes(block.num_tokens)
        memory.reclaim(block)
