"""HcclTransport: features between the cards of a host, over HCCL; within one card through the host's memory.

The conversation is that of ``SharedMemoryTransport``: one host, a Unix socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_backend_ascend.announcing_sender import AnnouncingSender
from spec_backend_ascend.hccl_memory import HcclEnd, OtherCards
from spec_core.streams.host_memory import StagedMemory
from spec_core.streams.shared_memory_receiver import SharedMemoryReceiver
from spec_core.streams.shared_memory_wire import Layout
from spec_core.transport import FeatureReceiver, FeatureSender, Transport

if TYPE_CHECKING:
    from spec_core.records import FeatureSchema


class HcclTransport(Transport):
    """Receives on, and sends from, the device that is current when an end is made."""

    def listen(self, schema: FeatureSchema, window_bytes: int) -> FeatureReceiver:
        device = torch.device("npu", torch.npu.current_device())
        layout = Layout(schema)
        memories = [OtherCards(layout, device), StagedMemory(layout, window_bytes, device)]
        return SharedMemoryReceiver(schema, window_bytes, memories)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        device = torch.device("npu", torch.npu.current_device())
        return AnnouncingSender(address, schema, timeout_s, HcclEnd(device))
