"""Define interfaces of the memory that stores a feature stream's samples, for receivers and senders.

The packets (``wire``) are the same for every kind of memory: the receiver allocates a block, the sender writes
it, and the receiver reads it in place and frees it. On a device, both sides synchronize by events, whose handles
are in the grant's payload; the host never waits for the device.
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
"""Callback that gets None when a sample has arrived completely, or the error if its transfer failed."""


@dataclass(frozen=True)
class Block:
    """Memory for one sample: offset in bytes in the pool, and number of tokens."""

    offset: int
    num_tokens: int


class BufferPoolFactory(ABC):
    """Returns the pool that each sender of a receiver writes to."""

    def serves(self, device_id: str) -> bool:
        """Return whether a sender on the device ``device_id`` (of ``SenderConnector``) can write to the pools."""
        return True

    @abstractmethod
    def admit(self, device_id: str, on_freed: Callable[[], None]) -> ReceiverPool:
        """Return the pool for a new sender on the device ``device_id``; it is closed with this factory.

        The pool calls ``on_freed``, from any thread, when memory was freed for which ``allocate`` may have failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the pools; their memory is freed with the last tensor that views it."""


class ReceiverPool(BufferPoolFactory):
    """The receiver's memory, of the size of its window.

    All senders share it, unless ``admit`` is overridden. Not thread-safe: the receiver calls it under a lock.
    """

    kind: str
    """Name of the kind of memory, by which ``SenderConnector.attach`` recognizes it."""
    descriptor: int | None
    """File descriptor that is passed to an admitted sender, which maps its first ``size`` bytes."""
    size: int
    offer: str = ""
    """Text that is sent to an admitted sender, such as an address."""

    def admit(self, device_id: str, on_freed: Callable[[], None]) -> ReceiverPool:
        """Return this pool, which all senders share."""
        return self

    @abstractmethod
    def allocate(self, num_tokens: int) -> Block | None:
        """Return a block for a sample of ``num_tokens`` tokens; None if other blocks must be freed first."""

    def grant_payload(self, block: Block) -> bytes:
        """Return the information about a block that the sender needs besides its offset, as bytes."""
        return b""

    def fill(self, block: Block, position: int, data: bytes) -> None:
        """Write bytes of a sample at ``position`` of its block. Raise ProtocolError if they do not fit."""
        raise ProtocolError(f"it sent bytes for memory of kind {self.kind!r}, which it writes itself")

    def fetch(self, block: Block, arrived: Arrived) -> None:
        """Call ``arrived`` when an announced sample has arrived completely, or its transfer has failed.

        The pool may call ``arrived`` after ``fetch`` has returned and from another thread, but it keeps the order
        of the calls of ``fetch``.
        """
        arrived(None)

    def advance(self, sender_died: bool) -> bool:
        """Begin and end transfers by calls that only the thread of ``receive`` may make; return whether some go on.

        ``receive`` calls this again and again. ``sender_died``: whether the sender has disconnected without closing.
        """
        return False

    def disconnect(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when all fetched samples of a sender that is gone have arrived or failed."""
        ended()

    def is_written(self, block: Block) -> bool:
        """Return whether a sender that is now dead had written the block completely."""
        return True

    @abstractmethod
    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return a block's ``input_ids`` and ``hidden_TNH``, valid on the current stream until ``free``."""

    @abstractmethod
    def free(self, block: Block) -> None:
        """Free a block when the work queued on the current stream, which may still read it, is done."""

    def reclaim(self, block: Block) -> None:
        """Free a block that was not read and to which its sender no longer writes."""
        self.free(block)


class SenderBuffer(ABC):
    """A sender's view of a receiver's pool."""

    @abstractmethod
    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Copy ``sample`` into the block that ``grant`` names."""

    def packets(self, grant: Packet, sample: FeatureSample) -> Iterable[Packet]:
        """Return the packets to send after ``write``; none if ``write`` itself has transferred the sample."""
        return ()

    @abstractmethod
    def settle(self) -> None:
        """Wait until no write is in progress. The sender calls this after a failed send."""

    @abstractmethod
    def close(self) -> None:
        """Release the view of the receiver's memory."""


class SenderConnector(ABC):
    """Creates the sender's view of the pool that a receiver offers."""

    device_id: str = ""
    """Name of the device of the sender's tensors, the same in every process; empty for host memory."""

    @abstractmethod
    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        """Return the view of the pool in ``reply``. Raise ProtocolError for an unknown kind of memory.

        ``descriptor``: file descriptor of the pool's memory; None if the receiver is on another host.
        """
