"""DeviceMemory: samples in one arena of device memory that the processes of a GPU map.

The host of neither side waits for the device. Each block has a baton, an event that both processes know: the receiver
records on it when the block's last reader will be through, and the sender's copy waits for that; then the sender
records the end of its copy, and the receiver's reader waits for that.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from spec_backend_cuda.device_segment import DeviceSegment
from spec_core.streams.block_memory import Block, ReceiverMemory, SenderEnd, SenderMemory
from spec_core.streams.device_arena import (
    BatonNote,
    DeviceArena,
    ScatteredBlock,
    arena_bytes,
    copied_aside,
    copy_sample,
)
from spec_core.streams.host_memory import HostEnd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_core.streams.holes import Range
    from spec_core.streams.shared_memory_wire import Layout, Record, Welcome

_exported: weakref.WeakValueDictionary[bytes, Baton] = weakref.WeakValueDictionary()
"""This process's batons by handle: CUDA does not let a process open what it has exported itself. Batons, not events:
torch's events do not clear the weak references to them when they go."""


class Baton:
    """An event that both processes know."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.event = torch.cuda.Event(interprocess=True)
            self.handle: bytes = self.event.ipc_handle()
        _exported[self.handle] = self


@dataclass(frozen=True)
class DeviceBlock(ScatteredBlock):
    baton: Baton
    dirty: bool
    """Something may still read its memory."""


class DeviceMemory(ReceiverMemory):
    """A sample's reader waits on its stream for the sender's copy, the next sender's copy for the reader."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, layout: Layout, window_bytes: int, device: torch.device) -> None:
        self._device = device
        segment, self.descriptor = DeviceSegment.create(arena_bytes(layout, window_bytes), device)
        self._arena = DeviceArena(segment.bytes(), layout)
        self.size = self._arena.size
        self._spare: list[Baton] = []
        self._retired: list[Baton] = []
        """Nobody knows what is recorded on them. Kept, so that no new one gets a handle that a sender knows."""
        self._stream = torch.cuda.Stream(device)
        """On which batons are recorded; it does nothing else."""

    def serves(self, place: str) -> bool:
        return place == place_of(self._device)

    def allocate(self, num_tokens: int) -> Block | None:
        pieces = self._arena.take(num_tokens)
        if pieces is None:
            return None
        baton = self._spare.pop() if self._spare else Baton(self._device)
        readers = self._arena.readers(pieces)
        for read in readers:
            self._stream.wait_event(read)
        if readers:
            baton.event.record(self._stream)
        offset = pieces[0][0] if pieces else 0
        return DeviceBlock(offset, num_tokens, pieces, baton, bool(readers))

    def note(self, block: Block) -> bytes:
        assert isinstance(block, DeviceBlock)
        return BatonNote(block.dirty, block.baton.handle, block.pieces).encode()

    def is_written(self, block: Block) -> bool:
        assert isinstance(block, DeviceBlock)
        return block.baton.event.query()

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block, DeviceBlock)
        block.baton.event.wait(torch.cuda.current_stream(self._device))
        return self._arena.view(block.pieces, block.num_tokens)

    def free(self, block: Block) -> None:
        assert isinstance(block, DeviceBlock)
        read = torch.cuda.Event()
        read.record(torch.cuda.current_stream(self._device))
        self._arena.give(block.pieces, read)
        self._spare.append(block.baton)

    def reclaim(self, block: Block) -> None:
        assert isinstance(block, DeviceBlock)
        self._arena.give(block.pieces)
        self._retired.append(block.baton)

    def close(self) -> None:
        os.close(self.descriptor)
        self._arena.close()
        self._spare.clear()
        self._retired.clear()


class DeviceView(SenderMemory):
    def __init__(self, layout: Layout, descriptor: int, size: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._bytes = DeviceSegment.open(descriptor, size, device).bytes()
        self._batons: dict[bytes, torch.cuda.Event] = {}
        self._stream = torch.cuda.current_stream(device)
        """Of the last copy."""

    def write(self, grant: Record, sample: FeatureSample) -> None:
        note = BatonNote.decode(grant.note)
        baton = self._baton(note.baton)
        self._stream = torch.cuda.current_stream(self._device)
        if note.dirty:
            baton.wait(self._stream)
        if len(note.pieces) < 2:
            copy_sample(sample, self._layout.view(self._bytes, grant.value, len(sample.input_ids)))
        else:
            self._scatter(sample, note.pieces)
        baton.record(self._stream)

    def settle(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.settle()
        self._batons.clear()
        del self._bytes

    def _scatter(self, sample: FeatureSample, pieces: Sequence[Range]) -> None:
        whole = copied_aside(sample, self._layout, self._device)
        lengths = [stop - start for start, stop in pieces]
        for (start, stop), part in zip(pieces, whole.split(lengths), strict=True):
            self._bytes[start:stop].copy_(part)

    def _baton(self, handle: bytes) -> torch.cuda.Event:
        if handle not in self._batons:
            ours = _exported.get(handle)
            opened = torch.cuda.Event.from_ipc_handle(self._device, handle) if ours is None else ours.event
            self._batons[handle] = opened
        return self._batons[handle]


class DeviceEnd(SenderEnd):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place = place_of(device)

    def attach(self, welcome: Welcome, descriptor: int | None, layout: Layout) -> SenderMemory:
        if welcome.memory != DeviceMemory.kind or descriptor is None:
            return HostEnd().attach(welcome, descriptor, layout)
        return DeviceView(layout, descriptor, welcome.arena_bytes, self._device)


def place_of(device: torch.device) -> str:
    """The same in every process, whatever number the device has there."""
    return str(torch.cuda.get_device_properties(device).uuid)
