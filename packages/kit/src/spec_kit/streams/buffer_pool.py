"""The memory that samples of a feature stream lie in: what a receiver and its senders ask of it.

The packets (``wire``) are the same for every memory: the receiver allocates a block, the sender writes it, the
receiver reads it in place and frees it. On a device the two ends order their work by events, which travel in a
grant's payload; the host never waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from spec_core.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from spec_core.errors import RunError
    from spec_core.records import FeatureSample
    from spec_kit.streams.wire import ConnectReply, Packet, SampleLayout

Arrived: TypeAlias = "Callable[[RunError | None], None]"
"""Called with None when a sample is all there, else with why it never will be."""


@dataclass(frozen=True)
class Block:
    """Room for one sample."""

    offset: int
    num_tokens: int


class BufferPoolFactory(ABC):
    """Gives each sender of a receiver the pool that it writes to."""

    def serves(self, device_id: str) -> bool:
        """Return whether a sender on that device (``SenderConnector.device_id``) can write to its pools."""
        return True

    @abstractmethod
    def admit(self, device_id: str, has_room: Callable[[], None]) -> ReceiverPool:
        """Return the pool for one more sender on that device; it is closed with this factory.

        Any thread may call ``has_room`` when ``allocate`` would find room that it did not find before.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the pools back; their memory goes with the last view of it."""


class ReceiverPool(BufferPoolFactory):
    """The receiver's memory, large enough for a window of samples.

    All senders share it, unless ``admit`` is overridden. Not thread-safe: the receiver locks.
    """

    kind: str
    """Name by which ``SenderConnector.attach`` knows it."""
    descriptor: int | None
    """File descriptor that is passed to an admitted sender, which maps ``size`` bytes of it."""
    size: int
    offer: str = ""
    """Text for an admitted sender, such as the name of a link."""

    def admit(self, device_id: str, has_room: Callable[[], None]) -> ReceiverPool:
        """Return itself: all senders share it."""
        return self

    @abstractmethod
    def allocate(self, num_tokens: int) -> Block | None:
        """Return room for a sample of that many tokens, or None until other blocks are freed."""

    def grant_payload(self, block: Block) -> bytes:
        """Return what the sender must know of a block besides its offset."""
        return b""

    def fill(self, block: Block, position: int, data: bytes) -> None:
        """Write bytes of a sample that came over the connection. Raise ProtocolError where they do not belong."""
        raise ProtocolError(f"it sent bytes for memory of kind {self.kind!r}, which it writes itself")

    def fetch(self, block: Block, arrived: Arrived) -> None:
        """Call ``arrived`` once a sample that was announced is all there, or never will be.

        It may be called later and from another thread, but in the order of the calls of ``fetch``.
        """
        arrived(None)

    def disconnect(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when all that was fetched from a sender that is gone has arrived or failed."""
        ended()

    def is_written(self, block: Block) -> bool:
        """Return whether a sender that has died meanwhile had finished with the block."""
        return True

    @abstractmethod
    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return ``input_ids`` and ``hidden_TNH``, valid on the current stream until ``free``."""

    @abstractmethod
    def free(self, block: Block) -> None:
        """Free a block after the work on the current stream, where it has been read."""

    def reclaim(self, block: Block) -> None:
        """Free a block that was not read, and that its sender writes to no more."""
        self.free(block)


class SenderBuffer(ABC):
    """A sender's view of a receiver's pool."""

    @abstractmethod
    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Copy ``sample`` into the block that was granted."""

    def packets(self, grant: Packet, sample: FeatureSample) -> Iterable[Packet]:
        """Return what takes the sample over the connection after ``write``: nothing where that has put it there."""
        return ()

    @abstractmethod
    def settle(self) -> None:
        """Return when nothing is being written any more; called after a send that failed half-way."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the view."""


class SenderConnector(ABC):
    """How a sender reaches the pool that a receiver offers it."""

    device_id: str = ""
    """Name of the device that the sender's tensors are on, the same in every process; empty: the host."""

    @abstractmethod
    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        """Return the view of the pool behind ``descriptor``. Raise ProtocolError for a kind that it does not know."""
