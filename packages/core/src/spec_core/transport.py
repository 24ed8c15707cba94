"""A Transport sends features from several senders (engine workers) to one receiver (a trainer rank).

Contract (``spec_testing.TransportSuite`` quotes the numbers):

T1  The receiver publishes an opaque ``address``; a sender connects to it. If both have different feature schemas,
    SchemaMismatch is raised on the sender, naming both sides' tensors, before anything is sent. If nobody listens,
    ``connect`` raises PeerLost. Senders on other hosts can reach a receiver that has a ``host``.
T2  ``send`` hands over one sample and returns a Ticket. When the ticket is done, and not before, the caller may
    reuse the sample's memory: the bytes were copied, or the receiver released them. Only work that comes after
    ``send``, on the stream that was current in ``send``, may reuse memory of a device.
T3  ``receive`` returns samples exactly once, bit for bit, in the order of each sender.
T4  A received sample's tensors are valid on the current stream until ``release``; then its bytes are free for
    another sample. Releasing twice raises ProtocolError.
T5  Memory is bounded: at most ``window_bytes`` of samples (``FeatureSample.num_bytes``) of all senders together are
    between ``send`` and ``release``. A ``send`` that would exceed the window waits; any other ``send`` does not. A
    sample larger than the window raises ConfigError at once.
T6  Every call that can block takes ``timeout_s``, and raises DeadlineExceeded if it is not done in this time. No
    sample is lost then: a later call continues where the call stopped. A silent peer (a stopped process, for
    example) leads to DeadlineExceeded.
T7  A dead or closed peer raises PeerLost within the timeout, on both sides, and ends open tickets with this error.
    a) A sample whose ticket was done is delivered. b) After a clean close all samples are delivered. c) After a
    crash, samples whose ticket was open may be lost. d) ``receive`` raises PeerLost once for each sender that
    crashed, at its place in the stream, and then continues. e) When no sender is left, ``receive`` raises
    PeerLost once more, and then waits for another sender. A sender whose receiver is gone raises PeerLost in
    every call.
T8  ``flush`` waits until every ticket of this sender is done.
T9  ``close`` is idempotent and leaves nothing on the host: no shared memory, no socket, no thread. Memory that a
    sample still refers to is freed with the sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING

from spec_core.resource import Resource

if TYPE_CHECKING:
    from spec_core.records import FeatureSample, FeatureSchema

Ticket = Future[None]


class FeatureSender(Resource):
    """The sending side of a transport, in an engine's process."""

    @abstractmethod
    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        """Send one sample and return a Ticket, done when the sample's memory may be reused (T2, T5, T6).

        If the window is full, wait until the receiver releases samples.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Wait until every ticket of this sender is done (T8)."""


class FeatureReceiver(Resource):
    """The receiving side of a transport, in a trainer's process."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Return the address for senders to connect to, in printable ASCII (T1)."""

    @abstractmethod
    def receive(self, timeout_s: float) -> FeatureSample:
        """Wait for the next sample of any sender and return it (T3, T6, T7)."""

    @abstractmethod
    def release(self, sample: FeatureSample) -> None:
        """Free the window's memory that a received sample occupies (T4)."""


class Transport(ABC):
    """Connects the senders and receivers of features in one placement.

    It has no state except its configuration, and may be built in any process.
    """

    @abstractmethod
    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        """Return a receiver; all its senders share a window of ``window_bytes`` (T1, T5).

        ``host``: this host's address for senders on other hosts; empty if all senders are on this host.
        """

    @abstractmethod
    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        """Return a sender that is connected to the receiver at ``address`` (T1, T6)."""
