"""NcclTransport: features from the GPU of an engine to another one of a trainer, over NCCL.

The conversation is that of ``SharedMemoryTransport``, over a Unix socket, or TCP between hosts.
Samples go from GPU to GPU (``pushed_memory``); where both ends are on one GPU, or the sender is on the host, through
memory of the host.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch

from spec_backend_cuda.device_memory import place_of
from spec_backend_cuda.device_segment import DeviceSegment
from spec_backend_cuda.driver import UNSUPPORTED, CudaError
from spec_backend_cuda.nccl_line import NcclLine, offer
from spec_backend_cuda.pushed_memory import PushedMemory
from spec_backend_cuda.pushing_view import PushingView
from spec_core.streams.announcing_sender import AnnouncingSender
from spec_core.streams.block_memory import SenderEnd, SenderMemory
from spec_core.streams.device_arena import DeviceArena, arena_bytes
from spec_core.streams.host_memory import HostEnd, StagedMemory
from spec_core.streams.packet_relay import ReachableReceiver, address_from_here
from spec_core.streams.shared_memory_receiver import SharedMemoryReceiver
from spec_core.streams.shared_memory_wire import Layout
from spec_core.transport import FeatureReceiver, FeatureSender, Transport

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.records import FeatureSchema
    from spec_core.streams.block_memory import MemoryProvider
    from spec_core.streams.shared_memory_wire import Welcome

_PLACE = "nccl|"
"""Before the GPU of a sender that can send over NCCL."""


class NcclTransport(Transport):
    """Receives on, and sends from, the device that is current when an end is made."""

    def __init__(self, listen: str = "") -> None:
        """``listen``: ``host:port`` where senders of other hosts reach a receiver; empty: this host's only."""
        self._listen = listen

    def listen(self, schema: FeatureSchema, window_bytes: int) -> FeatureReceiver:
        device = torch.device("cuda", torch.cuda.current_device())
        layout = Layout(schema)
        memories: list[MemoryProvider] = [
            NcclMemory(layout, window_bytes, device),
            StagedMemory(layout, window_bytes, device),
        ]
        receiver = SharedMemoryReceiver(schema, window_bytes, memories)
        return ReachableReceiver(receiver, self._listen) if self._listen else receiver

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        device = torch.device("cuda", torch.cuda.current_device())
        deadline = time.monotonic() + timeout_s
        here = address_from_here(address, timeout_s)
        return AnnouncingSender(here, schema, deadline - time.monotonic(), NcclEnd(device))


class NcclMemory(PushedMemory):
    def __init__(self, layout: Layout, window_bytes: int, device: torch.device) -> None:
        arena = DeviceArena(_memory(arena_bytes(layout, window_bytes), device), layout)
        super().__init__(arena, device, self._line)

    def serves(self, place: str) -> bool:
        return place.startswith(_PLACE) and is_elsewhere(place, place_of(self.device))

    def _line(self) -> tuple[str, NcclLine]:
        name = offer()
        return name, NcclLine(name, self.device, receives=True)


class NcclEnd(SenderEnd):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place = _PLACE + place_of(device)

    def attach(self, welcome: Welcome, descriptor: int | None, layout: Layout) -> SenderMemory:
        if welcome.memory != NcclMemory.kind:
            return HostEnd().attach(welcome, descriptor, layout)
        return PushingView(layout, NcclLine(welcome.offer, self._device, receives=False), self._device)


def is_elsewhere(place: str, gpu: str) -> bool:
    """Whether a sender is on another GPU than ``gpu``: NCCL has no communicator of two on one."""
    return place.removeprefix(_PLACE) != gpu


def _memory(size: int, device: torch.device) -> Tensor:
    """Beside what torch's allocator may take, as the window of ``IpcTransport``, where the driver lets us."""
    try:
        segment, descriptor = DeviceSegment.create(size, device)
    except CudaError as error:
        if error.code not in UNSUPPORTED:
            raise
        return torch.empty(max(1, size), dtype=torch.uint8, device=device)
    os.close(descriptor)
    return segment.bytes()
