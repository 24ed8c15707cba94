"""IpcTransport sends features through device memory on one device, and else through host memory."""

from __future__ import annotations

import logging

import torch

from spec_core import FeatureReceiver, FeatureSender, Transport
from spec_core.errors import ConfigError
from spec_core.records import FeatureSchema
from spec_kit.streams.async_sender import AsyncSender
from spec_kit.streams.buffer_pool import ReceiverPool
from spec_kit.streams.connection import open_port
from spec_kit.streams.device_pool import DeviceConnector, DevicePool, DeviceSharing, SharingUnsupported
from spec_kit.streams.host_pool import HostConnector, HostPool
from spec_kit.streams.receiver import StreamReceiver
from spec_kit.streams.wire import SampleLayout

logger = logging.getLogger(__name__)


class IpcTransport(Transport):
    """Transport whose receivers and senders use the device that is current when they are created."""

    def __init__(self, sharing: type[DeviceSharing], *, share_device: bool, required: bool = False) -> None:
        """Use device memory, shared by the vendor's ``sharing``, if ``share_device``; else use host memory.

        If device memory cannot be shared, warn and use host memory, or raise ConfigError if ``required`` is true.
        """
        self._sharing_type = sharing
        self._share_device = share_device
        self._required = required

    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        """Return a receiver whose senders share ``window_bytes`` (T1, T5)."""
        sharing = self._sharing()
        port = open_port(host)
        layout = SampleLayout(schema)
        pools: list[ReceiverPool] = [HostPool(layout, window_bytes, sharing.device)]
        if self._share_device:
            try:
                pools.insert(0, DevicePool(layout, window_bytes, sharing))
            except SharingUnsupported as error:
                if self._required:
                    pools[0].close()
                    raise ConfigError(
                        f"backend.ipc=required, but {sharing.device} cannot share its memory: {error}; set "
                        "backend.ipc=auto to send features through host memory there"
                    ) from error
                logger.warning(
                    "features go through the host, since %s cannot share its memory: %s",
                    sharing.device,
                    error,
                )
        return StreamReceiver(schema, window_bytes, pools, port)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        """Return a sender to the receiver at ``address`` (T1, T6)."""
        connector = DeviceConnector(self._sharing()) if self._share_device else HostConnector()
        return AsyncSender(address, schema, timeout_s, connector)

    def _sharing(self) -> DeviceSharing:
        device_type = self._sharing_type.device_type
        index = torch.get_device_module(device_type).current_device()
        return self._sharing_type(torch.device(device_type, index))
