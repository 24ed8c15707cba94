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
    from torch import Tensor

    from spec_core.cpu.shared_memory_wire import Layout, Record, Welcome
    from spec_core.records import FeatureSample


@dataclass(frozen=True)
class Block:
    """Room for one sample."""

    offset: int
    num_tokens: int


class ReceiverMemory(ABC):
    """Memory of the receiver's, big enough for a window of samples. Not thread-safe: the receiver locks."""

    kind: ClassVar[str]
    """What ``SenderEnd.attach`` is told."""
    descriptor: int
    """Passed to a sender that is welcomed; it maps ``size`` bytes."""
    size: int

    def serves(self, place: str) -> bool:
        """Whether a sender at ``place`` (``SenderEnd.place``) can write to it."""
        return True

    @abstractmethod
    def allocate(self, num_tokens: int) -> Block | None:
        """Room for a sample of that many tokens, or None until other blocks are freed."""

    def note(self, block: Block) -> bytes:
        """What its sender must know besides the offset."""
        return b""

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

    @abstractmethod
    def close(self) -> None:
        """The memory itself goes with the last view of it."""


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
    def attach(self, welcome: Welcome, descriptor: int, layout: Layout) -> SenderMemory:
        """Maps the memory behind ``descriptor``; ProtocolError for a kind that it does not know."""
