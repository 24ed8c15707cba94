"""Allocate blocks in one range of device memory (DeviceArena), and copy samples on a device.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spec_core.records import FeatureSample
from spec_kit.streams.buffer_pool import Block
from spec_kit.streams.free_list import FreeList, Range
from spec_kit.streams.wire import SampleLayout

MAX_PIECES = 2_000
"""Largest number of ranges of a block; a packet has space for this number."""

_EVENT, _PIECE = struct.Struct("<?64s"), struct.Struct("<QQ")


class Event(Protocol):
    """A device event, such as ``torch.cuda.Event``, for any type of device."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""
        ...


@dataclass(frozen=True)
class ScatteredBlock(Block):
    """A block of several ranges (start, stop) in bytes, if no free range was large enough for the sample."""

    pieces: Sequence[Range]


class GrantInfo(NamedTuple):
    """Payload of the packet that grants a block of device memory to a sender."""

    pieces: Sequence[Range]
    event: bytes = bytes(64)
    """Interprocess handle of the block's event, which both processes use."""
    dirty: bool = False
    """Whether the device may still be reading the block; then the sender's copy must wait for the event."""

    def encode(self) -> bytes:
        """Return the payload's bytes."""
        return _EVENT.pack(self.dirty, self.event) + b"".join(_PIECE.pack(*piece) for piece in self.pieces)

    @classmethod
    def decode(cls, payload: bytes) -> GrantInfo:
        """Return the GrantInfo from the bytes that ``encode`` returned."""
        dirty, event = _EVENT.unpack_from(payload)
        pieces = [(start, stop) for start, stop in _PIECE.iter_unpack(payload[_EVENT.size :])]
        return cls(pieces, event, dirty)

    @property
    def lengths(self) -> list[int]:
        """Return the number of bytes of each range of the block."""
        return [stop - start for start, stop in self.pieces]


def arena_bytes(layout: SampleLayout, window_bytes: int) -> int:
    """Return how many bytes a window of ``window_bytes`` needs with the padding of its blocks.

    The padding is computed for samples of one token, which have the largest share of padding.
    """
    return -(-window_bytes * layout.block_bytes(1) // layout.sample_bytes(1))


class DeviceArena:
    """Allocates blocks at the lowest free addresses. Thread-safe.

    If no free range is large enough, a sample is scattered over several ranges, and gathered when it is read. So a
    sample never waits while enough bytes are free (T5).
    """

    def __init__(self, memory: Tensor, layout: SampleLayout) -> None:
        """Allocate from ``memory``, uint8 [bytes], contiguous."""
        self._bytes = memory
        self._layout = layout
        self.size = memory.nbytes
        self._free_list = FreeList(memory.nbytes)
        self._readers: list[tuple[Range, Event]] = []
        """Free ranges that the device may still be reading, each with the event after the read."""
        self._lock = threading.Lock()

    def allocate(self, num_tokens: int) -> list[Range] | None:
        """Return ranges for the block of a sample of ``num_tokens`` tokens, or None if too little is free."""
        if num_tokens == 0:
            return []
        with self._lock:
            pieces = self._free_list.allocate_scattered(self._layout.block_bytes(num_tokens))
        if pieces is not None and len(pieces) > MAX_PIECES:
            self.free(pieces)
            return None
        return pieces

    def free(self, pieces: Sequence[Range], read: Event | None = None) -> None:
        """Free ranges. ``read``: event for which the next writer of the ranges must wait."""
        with self._lock:
            for piece in pieces:
                self._free_list.free(*piece)
            if read is not None:
                self._readers += [(piece, read) for piece in pieces]

    def readers(self, pieces: Sequence[Range]) -> list[Event]:
        """Return the events for which a writer must wait before it overwrites the ranges ``pieces``."""
        with self._lock:
            self._readers = [(piece, read) for piece, read in self._readers if not read.query()]
            return [read for piece, read in self._readers if any(_overlap(piece, other) for other in pieces)]

    def parts(self, pieces: Sequence[Range]) -> list[Tensor]:
        """Return a uint8 view of each range, without a copy."""
        return [self._bytes[start:stop] for start, stop in pieces]

    def view(self, pieces: Sequence[Range], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return ``input_ids`` [T] and ``hidden_TNH``; gather a scattered block on the current stream."""
        if len(pieces) < 2:
            return self._layout.view(self._bytes, first_address(pieces), num_tokens)
        return self._layout.view(torch.cat(self.parts(pieces)), 0, num_tokens)

    def close(self) -> None:
        """Release the memory, which is freed with the last tensor that views it."""
        self._readers.clear()
        del self._bytes


def first_address(pieces: Sequence[Range]) -> int:
    """Return the offset in bytes of a block's first range; 0 for a sample without tokens."""
    return pieces[0][0] if pieces else 0


def copy_sample(sample: FeatureSample, targets: tuple[Tensor, Tensor]) -> None:
    """Queue a copy of a sample's ids and hidden states to ``targets`` on the current stream (T2).

    Afterwards work on the same stream may overwrite the sample's device memory. Stream order does not protect host
    memory. So the copy has read all host memory when the call returns: a copy from pageable memory always has, and
    a copy from pinned memory is made blocking.
    """
    for target, tensor in zip(targets, (sample.input_ids, sample.hidden_TNH), strict=True):
        pinned = tensor.is_cpu and tensor.is_pinned()
        target.copy_(tensor, non_blocking=not pinned)


def staged_copy(sample: FeatureSample, layout: SampleLayout, device: torch.device) -> Tensor:
    """Return a copy of a sample in the layout of a block, uint8 [bytes] on ``device``.

    It is made on the current stream.
    """
    num_tokens = len(sample.input_ids)
    staged = torch.empty(layout.block_bytes(num_tokens), dtype=torch.uint8, device=device)
    copy_sample(sample, layout.view(staged, 0, num_tokens))
    return staged


def _overlap(left: Range, right: Range) -> bool:
    return left[0] < right[1] and right[0] < left[1]
