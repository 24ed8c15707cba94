"""A WeightTransport moves the bytes of one update from a publisher to the ranks of one replica.

The publisher and every rank agree on a manifest and on a transport before a transfer, and compare digests
afterwards. So a transport need not check the tensors' bytes. It may fail, but must not hang: every call has a
deadline.

Contract (``spec_testing.WeightTransportSuite`` quotes the numbers):

W1  The receiver yields every tensor of the manifest once, bit for bit: any dtype, shape and number of bytes,
    tensors without elements too. A yielded tensor is valid until the next one is requested.
W2  Bytes travel in buckets of at most ``bucket_bytes``, but no larger than the payload. A larger tensor is split.
    Both sides use the sender's ``bucket_bytes``; ``receiver`` gets it as an argument.
W3  ``receiver``, ``sender`` and ``open`` do not wait for the other side. The sender gets each receiver's
    ``address``, and each receiver gets its element of the result of ``open``. Then ``send`` and ``receive`` run at
    the same time.
W4  A call that is not done at its ``deadline`` (a time of ``time.monotonic``) raises DeadlineExceeded. A call raises
    PeerLost if the other side has died or closed.
W5  Another thread may call ``close`` of a sender or receiver: calls in progress then raise PeerLost within a
    second. ``close`` is idempotent and leaves nothing but the cache of W7: no thread, no descriptor, no memory, no
    unfinished file.
W6  ``probe`` says why a transport cannot be used in this process, ``obstacle`` why it cannot reach a certain rank.
    ``medium`` returns the medium through which the bytes reach a rank. If the user lists no transports, the
    transport with the fastest medium is used.
W7  A transport may cache the connections and memory of an update for the next update of the same update group and
    replica. It uses the cache only if every side has completed the previous update and has a cache, too. Otherwise,
    such as after a failure, for other ranks or for a restarted process, all sides build both anew in the same update.
    ``forget`` releases the cache for a replica, ``close`` the whole cache. An update in progress keeps the resources
    that it uses.
W8  Only the publisher sets options (``Config``). A server opens the transport with default options, so every option
    has a default. If a rank must know an option of the sender, the option is in the rank's element of the result of
    ``open``.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from spec_core.config import WeightTransportConfig
from spec_core.records import Availability
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from spec_core.backend import Backend
    from spec_core.weight_manifest import Manifest


class WeightMedium(IntEnum):
    """The medium that the bytes of an update pass through, from fastest to slowest."""

    DEVICE_MEMORY = 1
    """Memory of one device, which both processes map."""
    DEVICE_LINK = 2
    """A link between two devices; the bytes do not pass through host memory."""
    HOST_MEMORY = 3
    """Host memory, which both processes map."""
    SOCKETS = 4
    FILES = 5
    UNSTATED = 6
    """The transport does not say what the bytes pass through."""

    def __str__(self) -> str:
        """Return the medium's name for messages, such as "host memory"."""
        return self.name.lower().replace("_", " ")


class WeightReceiver(Resource):
    """The receiving side of one update, in the process of one rank."""

    address: str = ""
    """Address at which the sender reaches this rank, in printable ASCII; empty if the sender needs none."""

    @abstractmethod
    def receive(self, sender: str, deadline: float) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of each received weight (W1).

        ``sender``: this rank's element of the sequence that ``WeightSender.open`` returned.
        """


class WeightSender(Resource):
    """The sending side of one update, in the publisher's process, for all ranks of one replica."""

    @abstractmethod
    def open(self, deadline: float) -> Sequence[str]:
        """Return the addresses at which the ranks reach this sender, in rank order and printable ASCII (W3)."""

    @abstractmethod
    def send(self, deadline: float) -> None:
        """Send every tensor to every rank. Call it once, after ``open``."""


class WeightTransport(Resource):
    """Sends weights from a publisher to replicas; the module's docstring has the contract.

    One object serves any number of updates, also concurrent ones.
    """

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[WeightTransportConfig]] = WeightTransportConfig

    def __init__(self, config: WeightTransportConfig, backend: Backend) -> None:
        """Store the validated options, and the backend of this process's device."""
        self.config = config
        self.backend = backend

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run the transport. Never raises, and imports nothing heavy (W6)."""
        return Availability(ok=True)

    @abstractmethod
    def location(self, device: torch.device) -> str:
        """Return the location of a rank on ``device`` of this process; the sender passes it to ``obstacle``."""

    @abstractmethod
    def obstacle(self, location: str, device: torch.device) -> str:
        """Return why a sender on ``device`` of this process cannot reach a rank; empty if it can.

        ``location``: the result of the method ``location`` in the rank's process.
        """

    def medium(self, location: str, device: torch.device) -> WeightMedium:
        """Return the medium from a sender on ``device`` to a rank that the sender can reach (``obstacle``).

        ``location``: the result of the method ``location`` in the rank's process.
        """
        return WeightMedium.UNSTATED

    @abstractmethod
    def receiver(self, manifest: Manifest, device: torch.device, bucket_bytes: int) -> WeightReceiver:
        """Return a receiver for a rank; ``bucket_bytes`` is the bucket size of the sender (W2, W3).

        Tensors arrive on ``device``, or on the CPU if that costs nothing more.
        """

    @abstractmethod
    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
        replica: str,
    ) -> WeightSender:
        """Return a sender to the ranks of ``replica`` (W3).

        ``receivers``: ``WeightReceiver.address`` of each rank. ``weights``: the manifest's tensors, on any device;
        nothing may change them until the sender is closed. Buckets are assembled on ``device``.
        """

    def forget(self, replica: str) -> None:
        """Release what is cached for the next update of a replica, because no update will follow (W7)."""

    def close(self) -> None:
        """Release what is cached for later updates; the transport can still be used afterwards (W7)."""
