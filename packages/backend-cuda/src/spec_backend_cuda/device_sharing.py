"""CudaSharing lets several processes map the same GPU memory (``DevicePool`` of ``spec_kit.streams``)."""

from __future__ import annotations

import os
from functools import partial
from typing import ClassVar

import torch

from spec_backend_cuda.device_segment import DeviceSegment
from spec_backend_cuda.driver import UNSUPPORTED, CudaError
from spec_core.records import FeatureSample
from spec_kit.streams import (
    DeviceSharing,
    GrantInfo,
    Packet,
    PeerEvents,
    SampleLayout,
    SenderBuffer,
    SharedMemory,
    SharingUnsupported,
    copy_sample,
    staged_copy,
)


class CudaSharing(DeviceSharing):
    """Shares memory of one GPU between processes.

    The reader's CUDA stream waits until a sender's copy into the memory is complete. Before the memory is
    overwritten, the stream of the next copy waits until the reader has finished.
    """

    device_type: ClassVar[str] = "cuda"
    records_copies: ClassVar[bool] = True

    @property
    def device_id(self) -> str:
        """Return the device's name, which is the same in every process."""
        return gpu_id(self.device)

    def create(self, size: int) -> SharedMemory:
        """Return new memory of at least ``size`` bytes that other processes can map."""
        try:
            segment, descriptor = DeviceSegment.create(size, self.device)
        except CudaError as error:
            if error.code not in UNSUPPORTED:
                raise
            raise SharingUnsupported(str(error)) from error
        memory = segment.bytes()
        return SharedMemory(memory, descriptor, memory.nbytes, partial(os.close, descriptor))

    def attach(self, descriptor: int, size: int, layout: SampleLayout) -> SenderBuffer:
        """Return the sender's buffer for the pool that the receiver offers."""
        return CudaBuffer(layout, descriptor, size, self.device)


class CudaBuffer(SenderBuffer):
    """A sender's buffer, which copies samples into the receiver's memory on the same GPU.

    A send is done when ``send`` returns, because later work on the current stream runs after the copy.
    """

    def __init__(self, layout: SampleLayout, descriptor: int, size: int, device: torch.device) -> None:
        """Map the receiver's memory of ``size`` bytes, which was exported as ``descriptor``."""
        self._layout = layout
        self._device = device
        self._bytes = DeviceSegment.open(descriptor, size, device).bytes()
        self._events = PeerEvents(device)
        self._stream = torch.cuda.current_stream(device)
        """Stream of the last copy."""

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Queue the copy of ``sample`` on the current stream, which first waits for the block's last reader."""
        info = GrantInfo.decode(grant.payload)
        event = self._events.open(info.event)
        self._stream = torch.cuda.current_stream(self._device)
        if info.dirty:
            event.wait(self._stream)
        if len(info.pieces) < 2:
            copy_sample(sample, self._layout.view(self._bytes, grant.value, len(sample.input_ids)))
        else:
            parts = staged_copy(sample, self._layout, self._device).split(info.lengths)
            for (start, stop), part in zip(info.pieces, parts, strict=True):
                self._bytes[start:stop].copy_(part)
        event.record(self._stream)

    def settle(self) -> None:
        """Wait until the last copy is complete."""
        self._stream.synchronize()

    def close(self) -> None:
        """Wait for the last copy and unmap the memory."""
        self.settle()
        self._events.close()
        del self._bytes


def gpu_id(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in every process, unlike the device's index."""
    return str(torch.cuda.get_device_properties(device).uuid)
