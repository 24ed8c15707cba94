"""DeviceArena: blocks in one piece of device memory, and how samples are copied on a device.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from spec_kit.streams.buffer_pool import Block
from spec_kit.streams.free_list import FreeList, Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_kit.streams.wire import SampleLayout

MAX_PIECES = 2_000
"""Largest number of pieces of a block: their ranges fit a packet with room to spare."""

_EVENT, _PIECE = struct.Struct("<?64s"), struct.Struct("<QQ")


class Event(Protocol):
    """An event of any device."""

    def query(self) -> bool:
        """Return whether the device has come to it."""
        ...


@dataclass(frozen=True)
class ScatteredBlock(Block):
    """A block whose ranges add up to the sample's size; more than one if no free range was large enough."""

    pieces: Sequence[Range]


class GrantInfo(NamedTuple):
    """Payload of a grant of device memory."""

    pieces: Sequence[Range]
    event: bytes = bytes(64)
    """Handle of an event that both processes know."""
    dirty: bool = False
    """Whether something may still read the block: the sender's copy waits for the event."""

    def encode(self) -> bytes:
        """Return the payload's bytes."""
        return _EVENT.pack(self.dirty, self.event) + b"".join(_PIECE.pack(*piece) for piece in self.pieces)

    @classmethod
    def decode(cls, payload: bytes) -> GrantInfo:
        """Return what ``encode`` has made ``payload`` of."""
        dirty, event = _EVENT.unpack_from(payload)
        pieces = [(start, stop) for start, stop in _PIECE.iter_unpack(payload[_EVENT.size :])]
        return cls(pieces, event, dirty)

    @property
    def lengths(self) -> list[int]:
        """Return the number of bytes of each piece."""
        return [stop - start for start, stop in self.pieces]


def arena_bytes(layout: SampleLayout, window_bytes: int) -> int:
    """Return the size of a window and the padding of its blocks; a sample of one token has most."""
    return -(-window_bytes * layout.block_bytes(1) // layout.sample_bytes(1))


class DeviceArena:
    """Allocates blocks at the lowest free addresses. Thread-safe.

    A sample that finds no free range of its size is scattered over several and gathered when it is read: what fits
    by bytes never waits for a range of the right size (T5).
    """

    def __init__(self, memory: Tensor, layout: SampleLayout) -> None:
        """Allocate from ``memory``, uint8 [bytes], contiguous."""
        self._bytes, self._layout = memory, layout
        self.size = memory.nbytes
        self._free_list = FreeList(memory.nbytes)
        self._readers: list[tuple[Range, Event]] = []
        """Free ranges that the device may still be reading."""
        self._lock = threading.Lock()

    def allocate(self, num_tokens: int) -> list[Range] | None:
        """Return ranges that add up to the block of such a sample, or None while there is no room."""
        if num_tokens == 0:
            return []
        with self._lock:
            pieces = self._free_list.allocate_scattered(self._layout.block_bytes(num_tokens))
        if pieces is not None and len(pieces) > MAX_PIECES:
            self.free(pieces)
            return None
        return pieces

    def free(self, pieces: Sequence[Range], read: Event | None = None) -> None:
        """Free ranges for others, who must wait for ``read``, if it is given, before they write there."""
        with self._lock:
            for piece in pieces:
                self._free_list.free(*piece)
            if read is not None:
                self._readers += [(piece, read) for piece in pieces]

    def readers(self, pieces: Sequence[Range]) -> list[Event]:
        """Return what is still to be waited for before these ranges are written to."""
        with self._lock:
            self._readers = [(piece, read) for piece, read in self._readers if not read.query()]
            return [read for piece, read in self._readers if any(_overlap(piece, other) for other in pieces)]

    def parts(self, pieces: Sequence[Range]) -> list[Tensor]:
        """Return the bytes of these ranges, not copied."""
        return [self._bytes[start:stop] for start, stop in pieces]

    def view(self, pieces: Sequence[Range], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return ``input_ids`` [T] and ``hidden_TNH``, gathered on the current stream if the block is scattered."""
        if len(pieces) < 2:
            return self._layout.view(self._bytes, first_address(pieces), num_tokens)
        return self._layout.view(torch.cat(self.parts(pieces)), 0, num_tokens)

    def close(self) -> None:
        """Forget the memory, which goes with the last view of it."""
        self._readers.clear()
        del self._bytes


def first_address(pieces: Sequence[Range]) -> int:
    """Return where a block begins; 0 for the block of a sample of no tokens."""
    return pieces[0][0] if pieces else 0


def copy_sample(sample: FeatureSample, targets: tuple[Tensor, Tensor]) -> None:
    """Copy a sample onto a device on the current stream, on which its memory may be reused from then on (T2).

    Stream order does not protect host memory. A copy from pageable memory has finished reading when it returns; from
    pinned memory it must block.
    """
    for target, tensor in zip(targets, (sample.input_ids, sample.hidden_TNH), strict=True):
        pinned = tensor.is_cpu and tensor.is_pinned()
        target.copy_(tensor, non_blocking=not pinned)


def staged_copy(sample: FeatureSample, layout: SampleLayout, device: torch.device) -> Tensor:
    """Return a copy of a sample as it lies in a block, uint8 [bytes] on ``device``, made on the current stream."""
    num_tokens = len(sample.input_ids)
    staged = torch.empty(layout.block_bytes(num_tokens), dtype=torch.uint8, device=device)
    copy_sample(sample, layout.view(staged, 0, num_tokens))
    return staged


def _overlap(left: Range, right: Range) -> bool:
    return left[0] < right[1] and right[0] < left[1]
