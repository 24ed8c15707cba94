"""NpuMemory: samples in one arena of a card's memory, written there by the senders of that card.

No thread of the caller's waits for the device. Each grant carries an event of the receiver's, recorded where the
block's last reader will be through: the sender's copy waits for that on its stream. A sample is announced once its
copy is complete (``announcing_sender``): no reader waits on its stream for a process that may die.
ACL shows one use of an event between processes: who made it records it, the other waits; there is no other here.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from spec_backend_ascend import acl
from spec_backend_ascend.announcing_sender import DeviceView
from spec_backend_ascend.place import place_of
from spec_core.errors import PeerLost, ProtocolError
from spec_core.streams.block_memory import Block, ReceiverMemory, SenderEnd, SenderMemory
from spec_core.streams.device_arena import BatonNote, DeviceArena, ScatteredBlock, arena_bytes
from spec_core.streams.host_memory import HostEnd
from spec_core.streams.shared_memory import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_core.streams.holes import Range
    from spec_core.streams.shared_memory_wire import Layout, Record, Welcome

_OFFER = struct.Struct("<65s7xQ")
"""The arena's key, and where in that allocation it begins."""

_own_allocations: dict[bytes, int] = {}
"""Addresses by key: a process does not import what it has exported itself."""
_own_events: dict[bytes, torch.npu.Event] = {}


class Batons:
    """Events of this process that others can wait for. Those that nobody uses stay for the next receiver: torch_npu
    destroys an event some time after its last owner has gone."""

    _spare: ClassVar[list[bytes]] = []

    def __init__(self) -> None:
        self._lent: set[bytes] = set()

    def take(self) -> bytes:
        """The handle of one that nobody waits for."""
        handle = self._spare.pop() if self._spare else self._new()
        self._lent.add(handle)
        return handle

    def give(self, handle: bytes) -> None:
        self._lent.remove(handle)
        self._spare.append(handle)

    def close(self) -> None:
        """Nobody knows who still waits for those that were not given back."""
        for handle in self._lent:
            del _own_events[handle]

    def _new(self) -> bytes:
        event = torch.npu.Event(interprocess=True)
        handle = event.ipc_handle()
        _own_events[handle] = event
        return handle


@dataclass(frozen=True)
class NpuBlock(ScatteredBlock):
    baton: bytes
    dirty: bool
    """Something may still read its memory."""


class NpuMemory(ReceiverMemory):
    """A sample's copy waits on its stream for the last reader of its place."""

    kind: ClassVar[str] = "npu"

    def __init__(self, layout: Layout, window_bytes: int, device: torch.device) -> None:
        self._device = device
        size = aligned(arena_bytes(layout, window_bytes))
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._key, offset = _export(memory)
        self.size = _OFFER.size
        self.descriptor = os.memfd_create("spec-offer", os.MFD_CLOEXEC)
        os.write(self.descriptor, _OFFER.pack(self._key, offset))
        self._arena = DeviceArena(memory, layout)
        self._batons = Batons()
        self._stream = torch.npu.Stream(device)
        """On which batons are recorded; it does nothing else."""

    def serves(self, place: str) -> bool:
        return place == place_of(self._device)

    def allocate(self, num_tokens: int) -> Block | None:
        pieces = self._arena.take(num_tokens)
        if pieces is None:
            return None
        torch.npu.set_device(self._device)  # the thread that listens to senders has none yet
        baton = self._batons.take()
        readers = self._arena.readers(pieces)
        for read in readers:
            self._stream.wait_event(read)
        if readers:
            _own_events[baton].record(self._stream)
            acl.drained(self._stream)  # the sender must find the record on the device
        offset = pieces[0][0] if pieces else 0
        return NpuBlock(offset, num_tokens, pieces, baton, bool(readers))

    def note(self, block: Block) -> bytes:
        assert isinstance(block, NpuBlock)
        return BatonNote(block.dirty, block.baton, block.pieces).encode()

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block, NpuBlock)
        return self._arena.view(block.pieces, block.num_tokens)

    def free(self, block: Block) -> None:
        assert isinstance(block, NpuBlock)
        read = torch.npu.Event()
        read.record(torch.npu.current_stream(self._device))
        self._arena.give(block.pieces, read)
        self._batons.give(block.baton)

    def reclaim(self, block: Block) -> None:
        """Its baton is not used again: nobody knows who waits for it."""
        assert isinstance(block, NpuBlock)
        self._arena.give(block.pieces)

    def close(self) -> None:
        acl.close_memory(self._key)
        del _own_allocations[self._key]
        os.close(self.descriptor)
        self._batons.close()
        self._arena.close()


class NpuView(DeviceView):
    """Knows the arena by its address alone; every copy is on the current stream."""

    def __init__(self, layout: Layout, descriptor: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._key, offset = _OFFER.unpack(os.pread(descriptor, _OFFER.size, 0))
        self._imported = self._key not in _own_allocations
        base = acl.import_memory(self._key) if self._imported else _own_allocations[self._key]
        self._address = base + offset
        self._batons: dict[bytes, torch.npu.Event] = {}
        self._copied = torch.npu.Event()

    def write(self, grant: Record, sample: FeatureSample) -> None:
        """``copied`` says when it is."""
        note = BatonNote.decode(grant.note)
        stream = torch.npu.current_stream(self._device)
        if note.dirty:
            stream.wait_event(self._baton(note.baton))
        for target, source, size in _transfers(note.pieces, self._parts(sample)):
            acl.copy_on_stream(self._address + target, source, size, stream.npu_stream)
        self._copied = torch.npu.Event()
        self._copied.record(stream)

    @property
    def copied(self) -> torch.npu.Event:
        return self._copied

    def settle(self) -> None:
        self._copied.synchronize()

    def close(self) -> None:
        self.settle()
        if self._imported:
            acl.close_memory(self._key)
        self._batons.clear()

    def _baton(self, handle: bytes) -> torch.npu.Event:
        if handle in _own_events:
            return _own_events[handle]
        if handle not in self._batons:
            try:
                self._batons[handle] = torch.npu.Event.from_ipc_handle(self._device, handle)
            except RuntimeError as error:  # torch's only error; the handle was good while its maker lived
                raise PeerLost(f"the receiver's event is gone: {error}") from error
        return self._batons[handle]

    def _parts(self, sample: FeatureSample) -> list[Tensor]:
        """As they follow each other in a block; raw copies want them on the device and without gaps."""
        ids, hidden = sample.input_ids.to(self._device), sample.hidden_TNH.to(self._device)
        return [ids.contiguous(), hidden.contiguous()]


class NpuEnd(SenderEnd):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place = place_of(device)

    def attach(self, welcome: Welcome, descriptor: int | None, layout: Layout) -> SenderMemory:
        if welcome.memory != NpuMemory.kind or descriptor is None:
            return HostEnd().attach(welcome, descriptor, layout)
        if welcome.arena_bytes != _OFFER.size:
            raise ProtocolError(
                f"the receiver's offer has {welcome.arena_bytes} bytes instead of {_OFFER.size}"
            )
        return NpuView(layout, descriptor, self._device)


def _export(tensor: Tensor) -> tuple[bytes, int]:
    """Key of the allocation that ``tensor`` lies in, and where it begins there."""
    address = tensor.data_ptr()
    for segment in torch.npu.memory_snapshot():
        start, size = segment["address"], segment["total_size"]
        if start <= address < start + size:
            key = acl.export_memory(start, size)
            _own_allocations[key] = start
            return key, address - start
    raise ProtocolError("torch's allocator does not list the arena's memory")


def _transfers(pieces: Sequence[Range], parts: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """(offset in the arena, address, bytes) of every copy that lays ``parts`` out over ``pieces``; each part begins
    at an aligned place of the block."""
    begin = 0
    for part in parts:
        at = 0
        for start, stop in pieces:
            size = stop - start
            first, last = max(begin, at), min(begin + part.nbytes, at + size)
            if first < last:
                yield start + first - at, part.data_ptr() + first - begin, last - first
            at += size
        begin += aligned(part.nbytes)
