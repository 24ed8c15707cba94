"""IpcTransport: features between the processes of one GPU, in its memory; through the host's memory between others.

The conversation is that of ``SharedMemoryTransport``; only what the samples lie in differs. A ticket is
done when ``send`` returns: work on the stream that was current then comes after the copy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from spec_backend_cuda.device_memory import DeviceEnd, DeviceMemory
from spec_backend_cuda.driver import UNSUPPORTED, CudaError
from spec_core.streams.host_memory import HostEnd, StagedMemory
from spec_core.streams.shared_memory_receiver import SharedMemoryReceiver
from spec_core.streams.shared_memory_transport import SharedMemorySender
from spec_core.streams.shared_memory_wire import Layout
from spec_core.transport import FeatureReceiver, FeatureSender, Transport

if TYPE_CHECKING:
    from spec_core.records import FeatureSchema
    from spec_core.streams.block_memory import ReceiverMemory

log = logging.getLogger(__name__)


class IpcTransport(Transport):
    """Receives on, and sends from, the device that is current when an end is made."""

    def __init__(self, *, share_device: bool) -> None:
        """``share_device``: False always goes through the host."""
        self._share_device = share_device

    def listen(self, schema: FeatureSchema, window_bytes: int) -> FeatureReceiver:
        device = torch.device("cuda", torch.cuda.current_device())
        layout = Layout(schema)
        memories: list[ReceiverMemory] = [StagedMemory(layout, window_bytes, device)]
        if self._share_device:
            try:
                memories.insert(0, DeviceMemory(layout, window_bytes, device))
            except CudaError as error:
                if error.code not in UNSUPPORTED:
                    raise
                log.warning(
                    "features go through the host, since %s cannot share its memory: %s", device, error
                )
        return SharedMemoryReceiver(schema, window_bytes, memories)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        device = torch.device("cuda", torch.cuda.current_device())
        end = DeviceEnd(device) if self._share_device else HostEnd()
        return SharedMemorySender(address, schema, timeout_s, end)
