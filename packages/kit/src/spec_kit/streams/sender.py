"""StreamSender is the engine's side of a feature stream between processes (packets: ``wire``)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager

from spec_core import FeatureSender
from spec_core.errors import DeadlineExceeded, ProtocolError, RunError, SchemaMismatch
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.transport import Ticket
from spec_kit.streams.buffer_pool import SenderBuffer, SenderConnector
from spec_kit.streams.connection import connect_stream, hang_up, split_address
from spec_kit.streams.window import check_size
from spec_kit.streams.wire import ConnectReply, ConnectRequest, Packet, PacketKind, SampleLayout
from spec_processes.sockets.framed_socket import peer_errors

_done: Ticket = Future()
"""The completed future that every ``send`` returns as its ticket, since ``send`` blocks until it is done."""
_done.set_result(None)


class StreamSender(FeatureSender):
    """Sender without a thread. Each call blocks until its exchange with the receiver ends; one call at a time."""

    def __init__(
        self, address: str, schema: FeatureSchema, timeout_s: float, connector: SenderConnector
    ) -> None:
        """Connect to the receiver at ``address`` (T1)."""
        self._name, token, remote = split_address(address)
        self._schema = schema
        self._layout = SampleLayout(schema)
        self._buffer: SenderBuffer
        self._in_use = threading.Lock()
        self._number = 0
        self._closed = False
        deadline = time.monotonic() + timeout_s
        with self._mapped():
            self._channel = connect_stream(self._name, remote, timeout_s)
        try:
            self._handshake(token, connector, deadline)
        except BaseException:
            self._channel.close()
            raise

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        """Copy a sample into the receiver's memory (T2, T5, T6)."""
        self._check(sample)
        num_tokens = len(sample.input_ids)
        with self._exclusive(timeout_s) as deadline, self._withdrawn_on_error():
            grant = self._reserve(num_tokens, deadline)
            self._buffer.write(grant, sample)
            for packet in self._buffer.packets(grant, sample):
                self._send_packet(packet, deadline)
            self._send_packet(Packet(PacketKind.READY, self._number, sample.request_id), deadline)
        return _done

    def flush(self, timeout_s: float) -> None:
        """Wait for a ``send`` that another thread has begun. A ``send`` that has returned is complete."""
        with self._exclusive(timeout_s):
            pass

    def close(self) -> None:
        """End the connection. Idempotent (T9)."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._channel.send(Packet(PacketKind.CLOSE).encode(), time.monotonic())
        hang_up(self._channel)  # this wakes a ``send`` in another thread
        with self._in_use:
            self._close_buffer()
            self._channel.close()

    def _close_buffer(self) -> None:
        self._buffer.close()

    def _check(self, sample: FeatureSample) -> None:
        if not self._layout.fits(sample):
            got = f"{sample.hidden_TNH.dtype} {tuple(sample.hidden_TNH.shape)}"
            raise SchemaMismatch(
                f"sample {sample.request_id} has hidden states {got}, agreed was {self._schema}"
            )
        check_size(sample, self._window_bytes)

    @contextlib.contextmanager
    def _exclusive(self, timeout_s: float) -> Generator[float]:
        """Reserve the connection for this thread; yield the deadline (``time.monotonic``) of the call."""
        deadline = time.monotonic() + timeout_s
        if not self._in_use.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineExceeded(f"another thread's send to {self._name} took longer than {timeout_s} s")
        try:
            if self._closed:
                raise ProtocolError("the sender was closed")
            yield deadline
        finally:
            self._in_use.release()

    def _reserve(self, num_tokens: int, deadline: float) -> Packet:
        """Request a block for a sample of ``num_tokens`` tokens, and return the packet that grants it."""
        self._number += 1
        self._send_packet(Packet(PacketKind.REQUEST, self._number, num_tokens), deadline)
        while True:
            with self._mapped():
                grant = Packet.decode(self._channel.receive(deadline))
            if grant.kind is PacketKind.GRANT and grant.number == self._number:
                return grant  # an older number answers a request that was withdrawn meanwhile

    @contextlib.contextmanager
    def _withdrawn_on_error(self) -> Generator[None]:
        """Withdraw the request or the granted block if a send fails, for example at its deadline (T6).

        If even the withdrawal cannot be sent, because the network is down, the connection is ended.
        """
        try:
            yield
        except BaseException:
            self._buffer.settle()
            try:
                self._send_packet(Packet(PacketKind.WITHDRAW, self._number), time.monotonic())
            except RunError:  # the receiver reads nothing, so it would never free the block
                self._channel.shutdown()
            raise

    def _handshake(self, token: str, connector: SenderConnector, deadline: float) -> None:
        name = f"process {os.getpid()} of {socket.gethostname()}"
        request = ConnectRequest(token, self._schema, connector.device_id, sender=name)
        descriptors: list[int] = []
        try:
            with self._mapped():
                self._channel.send(request.encode(), deadline)
                reply = ConnectReply.decode(self._channel.receive(deadline, descriptors))
            if reply.refusal:
                raise (SchemaMismatch if reply.schema_differs else ProtocolError)(reply.refusal)
            self._window_bytes = reply.window_bytes
            self._buffer = connector.attach(reply, descriptors[0] if descriptors else None, self._layout)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _send_packet(self, packet: Packet, deadline: float) -> None:
        with self._mapped():
            self._channel.send(packet.encode(), deadline)

    def _mapped(self) -> AbstractContextManager[None]:
        return peer_errors(
            f"the receiver {self._name} gave no room or answer in time", f"the receiver {self._name} has gone"
        )
