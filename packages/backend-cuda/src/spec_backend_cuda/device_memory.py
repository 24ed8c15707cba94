"""DeviceMemory: samples in one arena of device memory that the processes of a GPU map.

The host of neither side waits for the device. Each block has a baton, an event that both processes know: the receiver
records on it when the block's last reader will be through, and the sender's copy waits for that; then the sender
records the end of its copy, and the receiver's reader waits for that.
"""

from __future__ import annotations

import os
import struct
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from spec_backend_cuda.device_segment import DeviceSegment
from spec_core.cpu.block_memory import Block, ReceiverMemory, SenderEnd, SenderMemory
from spec_core.cpu.holes import Holes, Range
from spec_core.cpu.host_memory import HostEnd, HostMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core.cpu.shared_memory_wire import Layout, Record, Welcome
    from spec_core.records import FeatureSample

MAX_PIECES = 2_000
"""What fits a packet of the wire with room to spare."""

_NOTE, _PIECE = struct.Struct("<?64s"), struct.Struct("<QQ")
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
class DeviceBlock(Block):
    pieces: Sequence[Range]
    """More than one if no hole was large enough; their lengths add up to the sample's block."""
    baton: Baton
    dirty: bool
    """Something may still read its memory: the sender's copy waits for the baton."""


class DeviceMemory(ReceiverMemory):
    """As many bytes as the window and the padding of blocks; a sample that finds no hole of its size is scattered
    over several and gathered when it is read, so what fits by bytes is never kept waiting (T5)."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, layout: Layout, window_bytes: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        padded = -(
            -window_bytes * layout.block_bytes(1) // layout.sample_bytes(1)
        )  # one token has most padding
        segment, self.descriptor = DeviceSegment.create(padded, device)
        self._bytes = segment.bytes()
        self.size = self._bytes.nbytes
        self._holes = Holes(self.size)
        self._spare: list[Baton] = []
        self._retired: list[Baton] = []
        """Nobody knows what is recorded on them. Kept, so that no new one gets a handle that a sender knows."""
        self._read: list[tuple[Range, torch.cuda.Event]] = []
        """Freed, but the device may still be reading."""
        self._stream = torch.cuda.Stream(device)
        """On which batons are recorded; it does nothing else."""

    def serves(self, place: str) -> bool:
        return place == place_of(self._device)

    def allocate(self, num_tokens: int) -> Block | None:
        pieces = self._holes.take_scattered(self._layout.block_bytes(num_tokens)) if num_tokens else []
        if pieces is None or len(pieces) > MAX_PIECES:
            self._give(pieces or [])
            return None
        baton = self._spare.pop() if self._spare else Baton(self._device)
        self._read = [(piece, done) for piece, done in self._read if not done.query()]
        readers = [done for freed, done in self._read if any(_overlap(freed, piece) for piece in pieces)]
        for done in readers:
            self._stream.wait_event(done)
        if readers:
            baton.event.record(self._stream)
        offset = pieces[0][0] if pieces else 0
        return DeviceBlock(offset, num_tokens, pieces, baton, bool(readers))

    def note(self, block: Block) -> bytes:
        assert isinstance(block, DeviceBlock)
        pieces = b"".join(_PIECE.pack(*piece) for piece in block.pieces)
        return _NOTE.pack(block.dirty, block.baton.handle) + pieces

    def is_written(self, block: Block) -> bool:
        assert isinstance(block, DeviceBlock)
        return block.baton.event.query()

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block, DeviceBlock)
        block.baton.event.wait(torch.cuda.current_stream(self._device))
        if len(block.pieces) < 2:
            return self._layout.view(self._bytes, block.offset, block.num_tokens)
        gathered = torch.cat([self._bytes[start:stop] for start, stop in block.pieces])
        return self._layout.view(gathered, 0, block.num_tokens)

    def free(self, block: Block) -> None:
        assert isinstance(block, DeviceBlock)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        self._read += [(piece, done) for piece in block.pieces]
        self._give(block.pieces)
        self._spare.append(block.baton)

    def reclaim(self, block: Block) -> None:
        assert isinstance(block, DeviceBlock)
        self._give(block.pieces)
        self._retired.append(block.baton)

    def close(self) -> None:
        os.close(self.descriptor)
        del self._bytes
        self._spare.clear()
        self._retired.clear()
        self._read.clear()

    def _give(self, pieces: Sequence[Range]) -> None:
        for piece in pieces:
            self._holes.give(*piece)


class DeviceView(SenderMemory):
    def __init__(self, layout: Layout, descriptor: int, size: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._bytes = DeviceSegment.open(descriptor, size, device).bytes()
        self._batons: dict[bytes, torch.cuda.Event] = {}
        self._stream = torch.cuda.current_stream(device)
        """Of the last copy."""

    def write(self, grant: Record, sample: FeatureSample) -> None:
        dirty, handle = _NOTE.unpack_from(grant.note)
        pieces = list(_PIECE.iter_unpack(grant.note[_NOTE.size :]))
        baton = self._baton(handle)
        self._stream = torch.cuda.current_stream(self._device)
        if dirty:
            baton.wait(self._stream)
        if len(pieces) < 2:
            self._copy(sample, self._bytes, grant.value)
        else:
            self._scatter(sample, pieces)
        baton.record(self._stream)

    def settle(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.settle()
        self._batons.clear()
        del self._bytes

    def _copy(self, sample: FeatureSample, arena: Tensor, offset: int) -> None:
        """Onto the current stream, on which the sample's memory may be reused from now on (T2)."""
        places = self._layout.view(arena, offset, len(sample.input_ids))
        for place, tensor in zip(places, (sample.input_ids, sample.hidden_TNH), strict=True):
            # The stream says nothing about the memory of a host; what is not pinned has been read on return, though.
            pinned = not tensor.is_cuda and tensor.is_pinned()
            place.copy_(tensor, non_blocking=not pinned)

    def _scatter(self, sample: FeatureSample, pieces: Sequence[Range]) -> None:
        size = self._layout.block_bytes(len(sample.input_ids))
        whole = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._copy(sample, whole, 0)
        lengths = [stop - start for start, stop in pieces]
        for (start, stop), part in zip(pieces, whole.split(lengths), strict=True):
            self._bytes[start:stop].copy_(part)

    def _baton(self, handle: bytes) -> torch.cuda.Event:
        if handle not in self._batons:
            ours = _exported.get(handle)
            opened = torch.cuda.Event.from_ipc_handle(self._device, handle) if ours is None else ours.event
            self._batons[handle] = opened
        return self._batons[handle]


class StagedMemory(HostMemory):
    """For senders of other devices and of the host: through memory of the host, delivered on ``device``."""

    def __init__(self, layout: Layout, window_bytes: int, device: torch.device) -> None:
        super().__init__(layout, window_bytes)
        self._device = device

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        ids, hidden = super().read(block)
        return ids.to(self._device), hidden.to(self._device)


class DeviceEnd(SenderEnd):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place = place_of(device)

    def attach(self, welcome: Welcome, descriptor: int, layout: Layout) -> SenderMemory:
        if welcome.memory != DeviceMemory.kind:
            return HostEnd().attach(welcome, descriptor, layout)
        return DeviceView(layout, descriptor, welcome.arena_bytes, self._device)


def place_of(device: torch.device) -> str:
    """The same in every process, whatever number the device has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _overlap(left: Range, right: Range) -> bool:
    return left[0] < right[1] and right[0] < left[1]
