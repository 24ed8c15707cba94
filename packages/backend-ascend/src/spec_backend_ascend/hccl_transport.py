"""HcclTransport sends features between a host's cards over HCCL, otherwise by host memory or TCP."""

from __future__ import annotations

import torch

from spec_backend_ascend.hccl_pool import HcclConnector, HcclPoolFactory
from spec_core import FeatureReceiver, FeatureSender, Transport
from spec_core.records import FeatureSchema
from spec_kit.streams import AsyncSender, HostPool, SampleLayout, StreamReceiver, open_port


class HcclTransport(Transport):
    """Receives on, and sends from, the device that is current when the receiver or sender is made."""

    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        """Return a receiver; its senders share a window of ``window_bytes`` bytes (T1, T5)."""
        port = open_port(host)
        device = torch.device("npu", torch.npu.current_device())
        layout = SampleLayout(schema)
        pools = [HcclPoolFactory(layout, device), HostPool(layout, window_bytes, device)]
        return StreamReceiver(schema, window_bytes, pools, port)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        """Return a sender to the receiver at ``address`` (T1, T6)."""
        device = torch.device("npu", torch.npu.current_device())
        return AsyncSender(address, schema, timeout_s, HcclConnector(device))
