"""Define pools in host memory that both processes map (``shared_memory``) or a sender fills over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import ProtocolError
from spec_kit.streams.buffer_pool import Block, ReceiverPool, SenderBuffer, SenderConnector
from spec_kit.streams.shared_memory import Arena, attach
from spec_kit.streams.wire import MAX_DATA_BYTES, Packet, PacketKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_kit.streams.wire import ConnectReply, SampleLayout


class HostPool(ReceiverPool):
    """Pool in shared host memory; samples are read in place, or copied to ``device`` if one is given."""

    kind = "host"

    def __init__(self, layout: SampleLayout, window_bytes: int, device: torch.device | None = None) -> None:
        """Allocate ``window_bytes`` of shared memory."""
        self._layout = layout
        self._device = device
        self._arena = Arena(window_bytes)
        self.descriptor, self.size = self._arena.descriptor, self._arena.size

    def allocate(self, num_tokens: int) -> Block | None:
        """Return a block for a sample of ``num_tokens`` tokens; None if other blocks must be freed first."""
        offset = self._arena.allocate(self._layout.block_bytes(num_tokens))
        return None if offset is None else Block(offset, num_tokens)

    def fill(self, block: Block, position: int, data: bytes) -> None:
        """Write a sample's bytes from a packet at ``position`` of its block."""
        if not 0 <= position <= self._layout.block_bytes(block.num_tokens) - len(data):
            raise ProtocolError(f"it sent {len(data)} bytes for position {position}, outside of its room")
        self._arena.write(block.offset + position, data)

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return a block's ``input_ids`` and ``hidden_TNH``, valid on the current stream until ``free``."""
        ids, hidden = self._layout.view(self._arena.bytes, block.offset, block.num_tokens)
        if self._device is None:
            return ids, hidden
        return ids.to(self._device), hidden.to(self._device)

    def free(self, block: Block) -> None:
        """Free a block."""
        self._arena.free(block.offset)

    def close(self) -> None:
        """Release the memory, which is freed with the last view of it."""
        self._arena.close()


class HostBuffer(SenderBuffer):
    """Writes samples into mapped host memory; ``write`` waits for a copy from a device."""

    def __init__(self, layout: SampleLayout, descriptor: int, size: int) -> None:
        """Map the receiver's memory of ``size`` bytes, whose file descriptor is ``descriptor``."""
        self._layout = layout
        self._mapping, self._bytes = attach(descriptor, size)

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Copy ``sample`` into the block that ``grant`` names."""
        ids, hidden = self._layout.view(self._bytes, grant.value, len(sample.input_ids))
        ids.copy_(sample.input_ids)
        hidden.copy_(sample.hidden_TNH)

    def settle(self) -> None:
        """Return at once, since ``write`` returns only after its copy."""

    def close(self) -> None:
        """Unmap the memory."""
        del self._mapping, self._bytes


class RemoteBuffer(SenderBuffer):
    """Sends samples to a receiver on another host, in the packets of the connection."""

    def __init__(self, layout: SampleLayout) -> None:
        """Send samples with the layout ``layout``."""
        self._layout = layout

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Do nothing; ``packets`` transfers the sample."""

    def packets(self, grant: Packet, sample: FeatureSample) -> Iterator[Packet]:
        """Yield packets with the bytes of the sample."""
        for start, part in self._layout.parts(sample):
            data = part.numpy().data
            for done in range(0, len(data), MAX_DATA_BYTES):
                piece = bytes(data[done : done + MAX_DATA_BYTES])
                yield Packet(PacketKind.DATA, grant.number, start + done, piece)

    def settle(self) -> None:
        """Return at once, since no write can be in progress."""

    def close(self) -> None:
        """Do nothing, since no resource is held."""


class HostConnector(SenderConnector):
    """Connects any sender to the host memory of a receiver on the same host or on another host."""

    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        """Return a buffer that writes samples into the receiver's pool of host memory.

        If ``descriptor`` is None, the receiver is on another host; then the buffer sends packets.
        """
        if reply.pool != HostPool.kind:
            raise ProtocolError(
                f"the receiver offers memory of kind {reply.pool!r}, which this sender cannot reach"
            )
        if descriptor is None:
            return RemoteBuffer(layout)
        return HostBuffer(layout, descriptor, reply.pool_bytes)
