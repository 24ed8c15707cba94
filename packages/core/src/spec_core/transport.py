"""Transport: a one-way stream of features, several senders (engine workers) to one receiver (a trainer rank).

Contract (``spec_testing.TransportSuite`` quotes the numbers):

T1  The receiver publishes an opaque ``address``; a sender connects to it. The schema is agreed there: a
    mismatch raises SchemaMismatch on the sender, naming both sides' tensors, before anything is sent. Where
    nobody listens, ``connect`` raises PeerLost. Senders of other hosts reach a receiver that was given a ``host``.
T2  ``send`` hands over one sample and returns a Ticket. When the ticket is done, and not before, the caller may
    reuse the sample's memory: the bytes were copied, or the receiver released them. On a device: by work that
    comes after ``send`` on the stream that was current then.
T3  ``receive`` returns samples exactly once, bit for bit, in the order of each sender.
T4  A received sample's tensors are valid on the current stream until ``release``; then its bytes are free for
    another sample. Releasing twice raises ProtocolError.
T5  Memory is bounded: at most ``window_bytes`` of samples (``FeatureSample.num_bytes``) of all senders together
    are between ``send`` and ``release``. A ``send`` beyond that waits, a ``send`` within it does not. A sample
    larger than the window raises ConfigError at once.
T6  Every call that can block takes ``timeout_s`` and raises DeadlineExceeded; nothing is lost by it: a later
    call goes on where it stopped. A peer that is silent, stopped for one, is not dead: this is how it shows.
T7  A dead or closed peer raises PeerLost within the timeout, on both sides, and completes the tickets with it.
    a) A sample whose ticket was done is delivered. b) After a clean close all samples are delivered. c) After a
    crash, samples whose ticket was open may be lost. d) ``receive`` raises PeerLost once for each sender that
    crashed, at its place in the stream, and then continues. e) Once no sender is left, ``receive`` raises it once
    more, and then waits for another sender; on the other side every call raises it.
T8  ``flush`` returns when every ticket of this sender is done.
T9  ``close`` is idempotent and leaves nothing on the host: no shared memory, no socket, no thread. Memory that a
    sample still refers to goes with the sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from spec_core.resource import Resource

if TYPE_CHECKING:
    from concurrent.futures import Future

    from spec_core.records import FeatureSample, FeatureSchema

    Ticket = Future[None]


class FeatureSender(Resource):
    """The engine's end."""

    @abstractmethod
    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        """Hand over one sample and return its ticket; wait for room if the window is full (T2, T5, T6)."""

    @abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Return when every ticket of this sender is done (T8)."""


class FeatureReceiver(Resource):
    """The trainer's end."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Return what a sender needs to connect, in printable ASCII (T1)."""

    @abstractmethod
    def receive(self, timeout_s: float) -> FeatureSample:
        """Return the next sample of any sender (T3, T6, T7)."""

    @abstractmethod
    def release(self, sample: FeatureSample) -> None:
        """Give the bytes of a sample free for another one (T4)."""


class Transport(ABC):
    """A way for features, for one placement. Stateless but for configuration; may be built in any process."""

    @abstractmethod
    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        """Return a receiver whose senders share ``window_bytes`` (T1, T5).

        ``host``: this host's address for senders of other hosts; empty where there are none.
        """

    @abstractmethod
    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        """Return a sender to the receiver at ``address`` (T1, T6)."""
