"""NcclTransport sends features from an engine's GPU to a trainer's GPU over NCCL.

Samples are sent from GPU to GPU (``push_pool``). If sender and receiver share a GPU, or the sender's samples
are in host memory, samples are sent through host memory.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from spec_backend_cuda.device_segment import DeviceSegment
from spec_backend_cuda.device_sharing import gpu_id
from spec_backend_cuda.driver import UNSUPPORTED, CudaError
from spec_backend_cuda.nccl_link import NcclLink, new_link_name
from spec_backend_cuda.push_buffer import PushBuffer
from spec_backend_cuda.push_pool import PushPool
from spec_core import FeatureReceiver, FeatureSender, Transport
from spec_core.records import FeatureSchema
from spec_kit.streams import (
    AsyncSender,
    BufferPoolFactory,
    ConnectReply,
    DeviceArena,
    HostConnector,
    HostPool,
    SampleLayout,
    SenderBuffer,
    SenderConnector,
    StreamReceiver,
    arena_bytes,
    open_port,
)
from spec_processes.sockets import parse_address

_PREFIX = "nccl|"
"""Prefix of the device id of a sender that can send over NCCL."""


class NcclTransport(Transport):
    """Receives on, and sends from, the device that is current when the receiver or sender is made."""

    def __init__(self, listen: str = "") -> None:
        """Store ``host:port``, at which receivers listen; if it is empty, ``listen`` chooses the address."""
        self._listen = listen

    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        """Return a receiver; its senders share a window of ``window_bytes`` bytes (T1, T5)."""
        device = torch.device("cuda", torch.cuda.current_device())
        layout = SampleLayout(schema)
        port = open_port(*parse_address(self._listen)) if self._listen else open_port(host)
        pools: list[BufferPoolFactory] = [
            NcclPool(layout, window_bytes, device),
            HostPool(layout, window_bytes, device),
        ]
        return StreamReceiver(schema, window_bytes, pools, port)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        """Return a sender to the receiver at ``address`` (T1, T6)."""
        device = torch.device("cuda", torch.cuda.current_device())
        return AsyncSender(address, schema, timeout_s, NcclConnector(device))


class NcclPool(PushPool):
    """Push pool for senders on other GPUs."""

    def __init__(self, layout: SampleLayout, window_bytes: int, device: torch.device) -> None:
        """Allocate a window on ``device``."""
        arena = DeviceArena(_memory(arena_bytes(layout, window_bytes), device), layout)
        super().__init__(arena, device, self._new_nccl_link)

    def serves(self, device_id: str) -> bool:
        """Return whether a sender on that device can use this pool."""
        return device_id.startswith(_PREFIX) and is_elsewhere(device_id, gpu_id(self.device))

    def _new_nccl_link(self) -> tuple[str, NcclLink]:
        name = new_link_name()
        return name, NcclLink(name, self.device, receives=True)


class NcclConnector(SenderConnector):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        """Store the device, and a device id that names its GPU."""
        self._device = device
        self.device_id = _PREFIX + gpu_id(device)

    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        """Return the sender's buffer for the pool that the receiver offers."""
        if reply.pool != NcclPool.kind:
            return HostConnector().attach(reply, descriptor, layout)
        return PushBuffer(layout, NcclLink(reply.offer, self._device, receives=False), self._device)


def is_elsewhere(device_id: str, gpu: str) -> bool:
    """Return whether the GPU of a sender's ``device_id`` is not ``gpu``.

    NCCL supports no communicator of two ranks on one GPU.
    """
    return device_id.removeprefix(_PREFIX) != gpu


def _memory(size: int, device: torch.device) -> Tensor:
    """Return memory outside torch's allocator, like ``CudaSharing``, if the driver supports it."""
    try:
        segment, descriptor = DeviceSegment.create(size, device)
    except CudaError as error:
        if error.code not in UNSUPPORTED:
            raise
        return torch.empty(max(1, size), dtype=torch.uint8, device=device)
    os.close(descriptor)
    return segment.bytes()
