"""This library gives backends feature streams and memory for samples (docs/libraries/streams.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.streams.async_sender import AsyncSender, DeferredBuffer, PendingSend, failure_of
    from spec_kit.streams.buffer_pool import (
        Arrived,
        Block,
        BufferPoolFactory,
        ReceiverPool,
        SenderBuffer,
        SenderConnector,
    )
    from spec_kit.streams.connection import open_port
    from spec_kit.streams.device_arena import (
        DeviceArena,
        GrantInfo,
        ScatteredBlock,
        arena_bytes,
        copy_sample,
        first_address,
        staged_copy,
    )
    from spec_kit.streams.device_pool import (
        DeviceSharing,
        PeerEvents,
        SharedMemory,
        SharingUnsupported,
    )
    from spec_kit.streams.free_list import Range
    from spec_kit.streams.host_pool import HostConnector, HostPool
    from spec_kit.streams.inline_transport import InlineTransport
    from spec_kit.streams.ipc_transport import IpcTransport
    from spec_kit.streams.receiver import StreamReceiver
    from spec_kit.streams.sender import StreamSender
    from spec_kit.streams.shared_memory import aligned
    from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
    from spec_kit.streams.wire import ConnectReply, Packet, SampleLayout
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "Arrived",
    "AsyncSender",
    "Block",
    "BufferPoolFactory",
    "ConnectReply",
    "DeferredBuffer",
    "DeviceArena",
    "DeviceSharing",
    "GrantInfo",
    "HostConnector",
    "HostPool",
    "InlineTransport",
    "IpcTransport",
    "Packet",
    "PeerEvents",
    "PendingSend",
    "Range",
    "ReceiverPool",
    "SampleLayout",
    "ScatteredBlock",
    "SenderBuffer",
    "SenderConnector",
    "SharedMemory",
    "SharedMemoryTransport",
    "SharingUnsupported",
    "StreamReceiver",
    "StreamSender",
    "aligned",
    "arena_bytes",
    "copy_sample",
    "failure_of",
    "first_address",
    "open_port",
    "staged_copy",
]
