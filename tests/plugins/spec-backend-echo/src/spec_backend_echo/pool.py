"""Samples between processes in a pool of this backend's own: memory without a name, which both processes map."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

from spec_core import Transport
from spec_core.errors import ProtocolError
from spec_kit.streams import (
    DeviceArena,
    GrantInfo,
    ReceiverPool,
    SampleLayout,
    ScatteredBlock,
    SenderBuffer,
    SenderConnector,
    StreamReceiver,
    StreamSender,
    arena_bytes,
    first_address,
    staged_copy,
)

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import FeatureReceiver, FeatureSender
    from spec_core.records import FeatureSample, FeatureSchema
    from spec_kit.streams import Block, ConnectReply, Packet


class EchoPool(ReceiverPool):
    """The receiver's end. A sample lies in one range of the memory, or in several where none is large enough."""

    kind = "echo"

    def __init__(self, layout: SampleLayout, window_bytes: int) -> None:
        self.size = arena_bytes(layout, window_bytes)
        self.descriptor = os.memfd_create("echo")
        os.ftruncate(self.descriptor, self.size)
        self._arena = DeviceArena(_mapped(self.descriptor, self.size), layout)

    def allocate(self, num_tokens: int) -> Block | None:
        pieces = self._arena.allocate(num_tokens)
        return None if pieces is None else ScatteredBlock(first_address(pieces), num_tokens, pieces)

    def grant_payload(self, block: Block) -> bytes:
        assert isinstance(block, ScatteredBlock)
        return GrantInfo(block.pieces).encode()

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block, ScatteredBlock)
        return self._arena.view(block.pieces, block.num_tokens)

    def free(self, block: Block) -> None:
        assert isinstance(block, ScatteredBlock)
        self._arena.free(block.pieces)

    def close(self) -> None:
        os.close(self.descriptor)
        self._arena.close()


class EchoBuffer(SenderBuffer):
    """A sender's end: it puts a sample into the ranges that it was granted."""

    def __init__(self, memory: Tensor, layout: SampleLayout) -> None:
        self._memory, self._layout = memory, layout

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        granted = GrantInfo.decode(grant.payload)
        staged = staged_copy(sample, self._layout, torch.device("cpu"))
        for (start, stop), part in zip(granted.pieces, staged.split(granted.lengths), strict=True):
            self._memory[start:stop] = part

    def settle(self) -> None:
        """Nothing is under way: ``write`` has copied when it returns."""

    def close(self) -> None:
        del self._memory


class EchoConnector(SenderConnector):
    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        if reply.pool != EchoPool.kind or descriptor is None:
            raise ProtocolError(f"the receiver offers memory of kind {reply.pool!r}, not {EchoPool.kind!r}")
        return EchoBuffer(_mapped(descriptor, reply.pool_bytes), layout)


class EchoTransport(Transport):
    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        return StreamReceiver(schema, window_bytes, [EchoPool(SampleLayout(schema), window_bytes)])

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        return StreamSender(address, schema, timeout_s, EchoConnector())


def _mapped(descriptor: int, size: int) -> Tensor:
    """Return the memory as bytes, uint8 [size]; it is unmapped with the last view of it."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
