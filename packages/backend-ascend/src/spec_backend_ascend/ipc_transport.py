"""IpcTransport: features between the processes of one card, in its memory; through the host's memory between others.

The conversation is that of ``SharedMemoryTransport``; only what the samples lie in differs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from spec_backend_ascend.acl import AclError
from spec_backend_ascend.announcing_sender import AnnouncingSender
from spec_backend_ascend.npu_memory import NpuEnd, NpuMemory
from spec_core.streams.host_memory import HostEnd, StagedMemory
from spec_core.streams.shared_memory_receiver import SharedMemoryReceiver
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
        device = torch.device("npu", torch.npu.current_device())
        layout = Layout(schema)
        memories: list[ReceiverMemory] = [StagedMemory(layout, window_bytes, device)]
        if self._share_device:
            try:
                memories.insert(0, NpuMemory(layout, window_bytes, device))
            except AclError as error:
                log.warning("features go through the host, since %s does not share memory: %s", device, error)
        return SharedMemoryReceiver(schema, window_bytes, memories)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        device = torch.device("npu", torch.npu.current_device())
        end = NpuEnd(device) if self._share_device else HostEnd()
        return AnnouncingSender(address, schema, timeout_s, end)
