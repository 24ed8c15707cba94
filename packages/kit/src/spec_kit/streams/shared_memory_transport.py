"""SharedMemoryTransport sends features through shared memory on one host, and over TCP between hosts.

The receiver owns one arena of shared memory for all its senders, so the window bounds their total memory. It
grants blocks in the order of the requests. The sender copies a sample into its block, or sends it over TCP to
the receiver, which copies it. The ticket is done when ``send`` returns (T2). The receiver returns views of the
block, and frees it at ``release``.
"""

from __future__ import annotations

from spec_core import FeatureReceiver, FeatureSender, Transport
from spec_core.records import FeatureSchema
from spec_kit.streams.connection import open_port
from spec_kit.streams.host_pool import HostConnector, HostPool
from spec_kit.streams.receiver import StreamReceiver
from spec_kit.streams.sender import StreamSender
from spec_kit.streams.wire import SampleLayout


class SharedMemoryTransport(Transport):
    """Transport through shared memory or TCP. An address is valid as long as its receiver exists."""

    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        """Return a receiver whose senders share ``window_bytes`` (T1, T5)."""
        port = open_port(host)
        return StreamReceiver(schema, window_bytes, [HostPool(SampleLayout(schema), window_bytes)], port)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        """Return a sender to the receiver at ``address`` (T1, T6)."""
        return StreamSender(address, schema, timeout_s, HostConnector())
