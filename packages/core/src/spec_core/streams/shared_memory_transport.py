"""SharedMemoryTransport: features between processes of one host, copied once, read in place.

The receiver owns one arena of shared memory for all its senders, so the window bounds the memory of all together,
and grants room in it in the order in which it was asked for. The sender copies a sample into its block: its ticket
is done when ``send`` returns (T2). The receiver hands out views of the block, and frees it at ``release``.

What the arena is made of is ``block_memory``'s business; other backends bring memory of their devices.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from spec_core import local_socket
from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, RunError, SchemaMismatch
from spec_core.streams.host_memory import HostEnd, HostMemory
from spec_core.streams.shared_memory_receiver import SharedMemoryReceiver
from spec_core.streams.shared_memory_wire import (
    MAX_PACKET_BYTES,
    Hello,
    Kind,
    Layout,
    Record,
    decode,
    decode_welcome,
    encode_json,
)
from spec_core.transport import FeatureReceiver, FeatureSender, Transport

if TYPE_CHECKING:
    from collections.abc import Generator

    from spec_core.records import FeatureSample, FeatureSchema
    from spec_core.streams.block_memory import SenderEnd, SenderMemory
    from spec_core.transport import Ticket


_done: Ticket = Future()
"""The ticket of every sample: there is nothing left to wait for when ``send`` returns."""
_done.set_result(None)


class SharedMemoryTransport(Transport):
    """An address is ``shm:<abstract socket name>:<token>``: good on one host, for one receiver's life."""

    def listen(self, schema: FeatureSchema, window_bytes: int) -> FeatureReceiver:
        return SharedMemoryReceiver(schema, window_bytes, [HostMemory(Layout(schema), window_bytes)])

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        return SharedMemorySender(address, schema, timeout_s, HostEnd())


class SharedMemorySender(FeatureSender):
    """Has no thread: a call talks to the receiver while it lasts. Threads that share it take turns."""

    def __init__(self, address: str, schema: FeatureSchema, timeout_s: float, end: SenderEnd) -> None:
        kind, _, rest = address.partition(":")
        self._name, _, token = rest.partition(":")
        if kind != "shm" or not token:
            raise ProtocolError(f"not an address of a shared-memory receiver: {kind}:{self._name}")
        self._schema, self._layout, self._end = schema, Layout(schema), end
        self._memory: SenderMemory
        self._turn = threading.Lock()
        self._number = 0
        self._closed = False
        deadline = time.monotonic() + timeout_s
        with self._mapped():
            self._socket = local_socket.connect(self._name, socket.SOCK_SEQPACKET, timeout_s)
        try:
            self._greet(token, deadline)
        except BaseException:
            self._socket.close()
            raise

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        self._check(sample)
        num_tokens = len(sample.input_ids)
        with self._exclusive(timeout_s) as deadline, self._withdrawn_on_error():
            self._memory.write(self._reserve(num_tokens, deadline), sample)
            self._tell(Record(Kind.READY, self._number, sample.request_id), deadline)
        return _done

    def flush(self, timeout_s: float) -> None:
        """Every ticket was done when its ``send`` returned; what remains is a ``send`` of another thread."""
        with self._exclusive(timeout_s):
            pass

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.send(Record(Kind.BYE).encode(), socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a send of another thread
        with self._turn:
            self._socket.close()
            self._memory.close()

    def _check(self, sample: FeatureSample) -> None:
        if not self._layout.fits(sample):
            got = f"{sample.hidden_TNH.dtype} {tuple(sample.hidden_TNH.shape)}"
            raise SchemaMismatch(
                f"sample {sample.request_id} has hidden states {got}, agreed was {self._schema}"
            )
        if sample.num_bytes > self._window_bytes:
            raise ConfigError(
                f"sample {sample.request_id} has {sample.num_bytes} bytes of features, "
                f"placement.window_bytes={self._window_bytes}; raise it or lower data.max_length"
            )

    @contextlib.contextmanager
    def _exclusive(self, timeout_s: float) -> Generator[float]:
        """This thread's turn; yields its deadline."""
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineExceeded(f"another thread's send to {self._name} took longer than {timeout_s} s")
        try:
            if self._closed:
                raise ProtocolError("the sender was closed")
            yield deadline
        finally:
            self._turn.release()

    def _reserve(self, num_tokens: int, deadline: float) -> Record:
        """The grant of a block for the sample."""
        self._number += 1
        self._tell(Record(Kind.REQUEST, self._number, num_tokens), deadline)
        while True:
            grant = decode(self._hear(deadline))
            if grant.kind is Kind.GRANT and grant.number == self._number:
                return grant  # an older number answers a request that was withdrawn meanwhile

    @contextlib.contextmanager
    def _withdrawn_on_error(self) -> Generator[None]:
        """A send that fails, at its deadline for one, leaves neither a request nor a block behind (T6)."""
        try:
            yield
        except BaseException:
            self._memory.settle()
            with contextlib.suppress(RunError):
                self._tell(Record(Kind.WITHDRAW, self._number), time.monotonic())
            raise

    def _greet(self, token: str, deadline: float) -> None:
        with self._blocking(deadline):
            who = f"process {os.getpid()} of {socket.gethostname()}"
            self._socket.send(encode_json(Hello(token, self._schema, self._end.place, who=who)))
        with self._blocking(deadline):
            packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
        try:
            self._settle(packet, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _settle(self, packet: bytes, descriptors: list[int]) -> None:
        if not packet:
            raise PeerLost(f"the receiver {self._name} has gone")
        welcome = decode_welcome(packet)
        if welcome.refusal:
            raise (SchemaMismatch if welcome.schema_differs else ProtocolError)(welcome.refusal)
        self._window_bytes = welcome.window_bytes
        self._memory = self._end.attach(welcome, descriptors[0] if descriptors else None, self._layout)

    def _tell(self, record: Record, deadline: float) -> None:
        with self._blocking(deadline):
            self._socket.send(record.encode())

    def _hear(self, deadline: float) -> bytes:
        with self._blocking(deadline):
            packet = self._socket.recv(MAX_PACKET_BYTES)
        if not packet:
            raise PeerLost(f"the receiver {self._name} has gone")
        return packet

    @contextlib.contextmanager
    def _blocking(self, deadline: float) -> Generator[None]:
        """One blocking call on the socket, its deadline set and its errors made ours."""
        self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
        with self._mapped():
            yield

    @contextlib.contextmanager
    def _mapped(self) -> Generator[None]:
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            raise DeadlineExceeded(f"the receiver {self._name} gave no room or answer in time") from error
        except OSError as error:
            raise PeerLost(f"the receiver {self._name} has gone: {error}") from error
