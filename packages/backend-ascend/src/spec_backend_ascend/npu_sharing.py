"""NpuSharing lets several processes share memory of a card (``DevicePool`` of ``spec_kit.streams``).

ACL documents one use of events between processes: the process that created the event records it, and another
process waits for it. This module uses events only in this way. A sample is therefore announced only when its
copy is complete, and no reader's stream waits for a process that may die.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from spec_backend_ascend import acl
from spec_backend_ascend.visible_devices import card_id
from spec_core.errors import ProtocolError
from spec_core.records import FeatureSample
from spec_kit.streams import (
    DeferredBuffer,
    DeviceSharing,
    GrantInfo,
    Packet,
    PeerEvents,
    PendingSend,
    Range,
    SampleLayout,
    SenderBuffer,
    SharedMemory,
    SharingUnsupported,
    aligned,
)

_OFFER = struct.Struct("<65s7xQ")
"""Layout of an offer: the memory's key, and the memory's offset, in bytes, within its allocation."""

_own_allocations: dict[bytes, int] = {}
"""Key → address of memory that this process has exported; a process does not import its own exports."""


class NpuSharing(DeviceSharing):
    """Shares memory of one card between processes.

    The stream that copies a sample into a block waits for the block's previous reader.
    """

    device_type: ClassVar[str] = "npu"
    records_copies: ClassVar[bool] = False

    @property
    def device_id(self) -> str:
        """Return the device's name, which is the same in every process."""
        return card_id(self.device)

    def create(self, size: int) -> SharedMemory:
        """Return new memory of at least ``size`` bytes that other processes can map."""
        memory = torch.empty(aligned(size), dtype=torch.uint8, device=self.device)
        try:
            key, offset = _export(memory)
        except acl.AclError as error:
            raise SharingUnsupported(str(error)) from error
        descriptor = os.memfd_create("spec-offer", os.MFD_CLOEXEC)
        os.write(descriptor, _OFFER.pack(key, offset))

        def close() -> None:
            acl.close_memory(key)
            del _own_allocations[key]
            os.close(descriptor)

        return SharedMemory(memory, descriptor, _OFFER.size, close)

    def attach(self, descriptor: int, size: int, layout: SampleLayout) -> SenderBuffer:
        """Return the sender's buffer for the pool that the receiver offers."""
        if size != _OFFER.size:
            raise ProtocolError(f"the receiver's offer has {size} bytes instead of {_OFFER.size}")
        return NpuBuffer(descriptor, self.device)

    def bind_thread(self) -> None:
        """Make the card the current device of this thread."""
        torch.npu.set_device(self.device)

    def submit(self, stream: Any) -> None:
        """Wait until torch_npu has passed the stream's work to the device."""
        acl.drain(stream)


class CopyOnStream(PendingSend):
    """A pending copy, whose completion is recorded as an event."""

    def __init__(self, copied: torch.npu.Event) -> None:
        """Store ``copied``, the event that follows the copy."""
        self._copied = copied

    def wait_sendable(self) -> None:
        """Wait until the copy is complete."""
        self._copied.synchronize()

    def wait_sent(self) -> None:
        """Do nothing: when a sample is announced, it is already in the receiver's memory."""


class NpuBuffer(DeferredBuffer):
    """A sender's buffer that writes to the receiver's memory by address; copies run on the current stream."""

    def __init__(self, descriptor: int, device: torch.device) -> None:
        """Map the memory; ``descriptor`` is a file that contains its key."""
        self._device = device
        self._key, offset = _OFFER.unpack(os.pread(descriptor, _OFFER.size, 0))
        self._imported = self._key not in _own_allocations
        base = acl.import_memory(self._key) if self._imported else _own_allocations[self._key]
        self._address = base + offset
        self._events = PeerEvents(device)
        self._copied = torch.npu.Event()

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Queue the copies of ``sample`` on the current stream."""
        info = GrantInfo.decode(grant.payload)
        stream = torch.npu.current_stream(self._device)
        if info.dirty:
            stream.wait_event(self._events.open(info.event))
        for target, source, size in _transfers(info.pieces, self._parts(sample)):
            acl.copy_on_stream(self._address + target, source, size, stream.npu_stream)
        self._copied = torch.npu.Event()
        self._copied.record(stream)

    def take_pending(self) -> PendingSend:
        """Return the pending copy that the last ``write`` started."""
        return CopyOnStream(self._copied)

    def settle(self) -> None:
        """Wait until the last copy is complete."""
        self._copied.synchronize()

    def close(self) -> None:
        """Wait for the last copy and unmap the memory."""
        self.settle()
        if self._imported:
            acl.close_memory(self._key)
        self._events.close()

    def _parts(self, sample: FeatureSample) -> list[Tensor]:
        """Return the sample's tensors, contiguous and on the device, in the order in which a block has them."""
        ids, hidden = sample.input_ids.to(self._device), sample.hidden_TNH.to(self._device)
        return [ids.contiguous(), hidden.contiguous()]


def _export(tensor: Tensor) -> tuple[bytes, int]:
    """Export the allocation that contains ``tensor``; return its key and the tensor's offset in bytes."""
    address = tensor.data_ptr()
    for segment in torch.npu.memory_snapshot():
        start, size = segment["address"], segment["total_size"]
        if start <= address < start + size:
            key = acl.export_memory(start, size)
            _own_allocations[key] = start
            return key, address - start
    raise ProtocolError("torch's allocator does not list the memory that is to be shared")


def _transfers(pieces: Sequence[Range], parts: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """Yield (target offset, source address, number of bytes) of each copy.

    The copies write ``parts``, the sample's tensors, into ``pieces``, the block's ranges of memory. Each part
    begins at an aligned offset of the block.
    """
    begin = 0
    for part in parts:
        at = 0
        for start, stop in pieces:
            size = stop - start
            first = max(begin, at)
            last = min(begin + part.nbytes, at + size)
            if first < last:
                yield start + first - at, part.data_ptr() + first - begin, last - first
            at += size
        begin += aligned(part.nbytes)
