"""InlineTransport passes samples without a copy between an engine and a trainer in one process."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from spec_core import FeatureReceiver, FeatureSender, Transport
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, SchemaMismatch
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.transport import Ticket
from spec_kit.streams.window import check_size, take_held


class InlineTransport(Transport):
    """Zero-copy transport whose two sides use one instance.

    A ticket is done when the receiver has released the sample (T2).
    """

    def __init__(self) -> None:
        """Start without receivers."""
        self._receivers: dict[str, InlineReceiver] = {}
        self._ids = itertools.count()

    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        """Return a receiver whose senders share ``window_bytes`` (T1, T5)."""
        address = f"inline:{next(self._ids)}"
        receiver = InlineReceiver(address, schema, window_bytes)
        self._receivers[address] = receiver
        return receiver

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        """Return a sender to the receiver at ``address`` (T1, T6)."""
        receiver = self._receivers.get(address)
        if receiver is None:
            raise PeerLost(f"no receiver listens at {address!r} in this process")
        if schema != receiver.schema:
            raise SchemaMismatch(f"the sender has {schema}, the receiver {address} wants {receiver.schema}")
        receiver.admit_sender()
        return InlineSender(receiver)


class InlineReceiver(FeatureReceiver):
    """The trainer's side: a queue bounded by bytes. One condition variable guards all of its state."""

    def __init__(self, address: str, schema: FeatureSchema, window_bytes: int) -> None:
        """Start with an empty queue of at most ``window_bytes``."""
        self.schema = schema
        self._closed = False
        self._address = address
        self._window_bytes = window_bytes
        self._used_bytes = 0
        self._num_senders = 0
        self._deserted = False
        """Whether all senders have left and ``receive`` has not reported it yet (T7)."""
        self._arrived: deque[tuple[FeatureSample, Ticket]] = deque()
        self._held: dict[FeatureSample, Ticket] = {}
        self._changed = threading.Condition()

    @property
    def address(self) -> str:
        """Return the address by which a sender connects (T1)."""
        return self._address

    def admit_sender(self) -> None:
        """Count a sender that has connected."""
        with self._changed:
            self._check_open()
            self._num_senders += 1

    def drop_sender(self) -> None:
        """Count a sender that has closed (T7)."""
        with self._changed:
            self._num_senders -= 1
            self._deserted = True
            self._changed.notify_all()

    def queue(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        """Wait until the window has enough free bytes, and queue a sample (T5)."""
        check_size(sample, self._window_bytes)
        size = sample.num_bytes
        with self._changed:
            self._wait(
                lambda: self._closed or self._used_bytes + size <= self._window_bytes, timeout_s, "room"
            )
            self._check_open()
            self._used_bytes += size
            ticket: Ticket = Future()
            self._arrived.append((sample, ticket))
            self._changed.notify_all()
            return ticket

    def receive(self, timeout_s: float) -> FeatureSample:
        """Return the next sample of any sender (T3, T6, T7)."""
        with self._changed:
            self._wait(self._has_changed, timeout_s, "a sample")
            self._check_open()
            if not self._arrived:
                self._deserted = False
                raise PeerLost(f"every sender of {self._address} has closed")
            sample, ticket = self._arrived.popleft()
            self._held[sample] = ticket
            return sample

    def release(self, sample: FeatureSample) -> None:
        """Free the bytes of a sample for other samples (T4)."""
        with self._changed:
            ticket = take_held(self._held, sample)
            self._used_bytes -= sample.num_bytes
            self._changed.notify_all()
        ticket.set_result(None)

    def close(self) -> None:
        """End the stream; pending tickets fail with PeerLost. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            pending = [*self._arrived, *self._held.items()]
            self._arrived.clear()
            self._held.clear()
            self._changed.notify_all()
        for _, ticket in pending:
            ticket.set_exception(PeerLost(f"the receiver at {self._address} was closed"))

    def _has_changed(self) -> bool:
        deserted = self._deserted and self._num_senders == 0
        return self._closed or bool(self._arrived) or deserted

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost(f"the receiver at {self._address} was closed")

    def _wait(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        if not self._changed.wait_for(ready, timeout_s):
            raise DeadlineExceeded(f"waited {timeout_s} s for {what} at {self._address}")


class InlineSender(FeatureSender):
    """The engine's side. It stores its pending tickets for ``flush``."""

    def __init__(self, receiver: InlineReceiver) -> None:
        """Send to ``receiver``."""
        self._receiver = receiver
        self._open: set[Ticket] = set()
        self._closed = False

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        """Pass a sample without a copy; the returned ticket is done when the sample is released (T2, T5, T6)."""
        if self._closed:
            raise ProtocolError("the sender was closed")
        ticket = self._receiver.queue(sample, timeout_s)
        self._open.add(ticket)
        ticket.add_done_callback(self._open.discard)
        return ticket

    def flush(self, timeout_s: float) -> None:
        """Wait until every ticket is done (T8)."""
        if late := wait(list(self._open), timeout_s).not_done:
            raise DeadlineExceeded(f"samples not released within {timeout_s} s: {len(late)}")

    def close(self) -> None:
        """End the stream of this sender. Idempotent."""
        if not self._closed:
            self._closed = True
            self._receiver.drop_sender()
