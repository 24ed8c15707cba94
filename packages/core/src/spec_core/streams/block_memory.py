"""Where samples lie between a sender and a receiver of one host: what SharedMemoryTransport asks of memory.

The conversation (``shared_memory_wire``) is the same for every memory: the receiver hands out a block, the sender
writes it, the receiver reads it in place and frees it. On a device the two ends order their work by events, which
travel as a grant's ``note``; the host never waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_core.errors import RunError
    from spec_core.records import FeatureSample
    from spec_core.streams.shared_memory_wire import Layout, Record, Welcome

    Arrived = Callable[[RunError | None], None]


@dataclass(frozen=True)
class Block:
    """Room for one sample."""

    offset: int
    num_tokens: int


class MemoryProvider(ABC):
    """Where a receiver's senders get memory from."""

    def serves(self, place: str) -> bool:
        """Whether a sender at ``place`` (``SenderEnd.place``) can write to it."""
        return True

    @abstractmethod
    def admit(self, place: str, room: Callable[[], None]) -> ReceiverMemory:
        """Memory for one more sender, at ``place``, that it serves; it goes with this provider. ``room`` may be
        called, by any thread, when ``allocate`` would find room that it did not find before."""

    @abstractmethod
    def close(self) -> None:
        """The memory itself goes with the last view of it."""


class ReceiverMemory(MemoryProvider):
    """Memory of the receiver's, big enough for a window of samples; all its senders share it, unless ``admit`` says
    something else. Not thread-safe: the receiver locks."""

    kind: ClassVar[str]
    """What ``SenderEnd.attach`` is told."""
    descriptor: int | None
    """Passed to a sender that is welcomed; it maps ``size`` bytes."""
    size: int
    offer: str = ""
    """What else a sender that is welcomed must know."""

    def admit(self, place: str, room: Callable[[], None]) -> ReceiverMemory:
        return self

    @abstractmethod
    def allocate(self, num_tokens: int) -> Block | None:
        """Room for a sample of that many tokens, or None until other blocks are freed."""

    def note(self, block: Block) -> bytes:
        """What its sender must know besides the offset."""
        return b""

    def fetch(self, block: Block, arrived: Arrived) -> None:
        """Its sender has announced it. Calls ``arrived``, perhaps later and from another thread, when the sample is
        all there, or never will be; in the order of the calls of ``fetch``."""
        arrived(None)

    def part(self, ended: Callable[[], None]) -> None:
        """A sender that it has admitted is gone. Calls ``ended`` when all that was fetched has arrived or failed."""
        ended()

    def is_written(self, block: Block) -> bool:
        """Whether a sender that has died meanwhile had finished with it."""
        return True

    @abstractmethod
    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """``input_ids`` and ``hidden_TNH``, valid on the current stream until ``free``."""

    @abstractmethod
    def free(self, block: Block) -> None:
        """After the work on the current stream, where it has been read."""

    def reclaim(self, block: Block) -> None:
        """Frees a block that was not read, and whose sender writes to it no more."""
        self.free(block)


class SenderMemory(ABC):
    """A sender's view of a receiver's memory."""

    @abstractmethod
    def write(self, grant: Record, sample: FeatureSample) -> None:
        """Copies ``sample`` into the block that was granted."""

    @abstractmethod
    def settle(self) -> None:
        """Returns when nothing is being written any more; for a send that failed half-way."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the view."""


class SenderEnd(ABC):
    """How a sender reaches the memory that a receiver offers it."""

    place: str = ""
    """Where the sender's tensors are; empty: on the host."""

    @abstractmethod
    def attach(self, welcome: Welcome, descriptor: int | None, layout: Layout) -> SenderMemory:
        """Maps the memory behind ``descriptor``; ProtocolError for a kind that it does not know."""
