"""DeviceArena: samples in one piece of device memory, and what else the memories of several backends share.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from spec_core.streams.block_memory import Block
from spec_core.streams.holes import Holes, Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_core.streams.shared_memory_wire import Layout

MAX_PIECES = 2_000
"""What fits a packet of the wire with room to spare."""


_BATON, _PIECE = struct.Struct("<?64s"), struct.Struct("<QQ")


class Event(Protocol):
    """What is asked of an event of any device."""

    def query(self) -> bool: ...


@dataclass(frozen=True)
class ScatteredBlock(Block):
    pieces: Sequence[Range]
    """More than one if no hole was large enough; their lengths add up to the sample's block."""


class BatonNote(NamedTuple):
    """The note of a grant whose block's readers are waited for by an event of both processes, the baton."""

    dirty: bool
    """Something may still read the block: the sender's copy waits for the baton."""
    baton: bytes
    """Handle of the event, 64 bytes."""
    pieces: Sequence[Range]

    def encode(self) -> bytes:
        return _BATON.pack(self.dirty, self.baton) + b"".join(_PIECE.pack(*piece) for piece in self.pieces)

    @classmethod
    def decode(cls, note: bytes) -> BatonNote:
        dirty, baton = _BATON.unpack_from(note)
        return cls(dirty, baton, [(start, stop) for start, stop in _PIECE.iter_unpack(note[_BATON.size :])])


def arena_bytes(layout: Layout, window_bytes: int) -> int:
    """A window and the padding of its blocks; a sample of one token has most."""
    return -(-window_bytes * layout.block_bytes(1) // layout.sample_bytes(1))


class DeviceArena:
    """Hands out room, lowest address first. A sample that finds no hole of its size is scattered over several and
    gathered when it is read, so what fits by bytes is never kept waiting (T5). Thread-safe."""

    def __init__(self, memory: Tensor, layout: Layout) -> None:
        """``memory``: uint8 [bytes], contiguous."""
        self._bytes, self._layout = memory, layout
        self.size = memory.nbytes
        self._holes = Holes(memory.nbytes)
        self._read: list[tuple[Range, Event]] = []
        """Given back, but the device may still be reading."""
        self._lock = threading.Lock()

    def take(self, num_tokens: int) -> list[Range] | None:
        """Ranges that add up to the block of such a sample, none for no tokens; None while there is no room."""
        if num_tokens == 0:
            return []
        with self._lock:
            pieces = self._holes.take_scattered(self._layout.block_bytes(num_tokens))
        if pieces is not None and len(pieces) > MAX_PIECES:
            self.give(pieces)
            return None
        return pieces

    def give(self, pieces: Sequence[Range], read: Event | None = None) -> None:
        """Frees them for others, who must wait for ``read`` before they write there; None: at once."""
        with self._lock:
            for piece in pieces:
                self._holes.give(*piece)
            if read is not None:
                self._read += [(piece, read) for piece in pieces]

    def readers(self, pieces: Sequence[Range]) -> list[Event]:
        """What is still to be waited for before these are written to."""
        with self._lock:
            self._read = [(piece, read) for piece, read in self._read if not read.query()]
            return [read for given, read in self._read if any(_overlap(given, piece) for piece in pieces)]

    def parts(self, pieces: Sequence[Range]) -> list[Tensor]:
        """Their bytes, not copied."""
        return [self._bytes[start:stop] for start, stop in pieces]

    def view(self, pieces: Sequence[Range], num_tokens: int) -> tuple[Tensor, Tensor]:
        """``input_ids`` [T] and ``hidden_TNH``: in place if they lie in one piece, else gathered on the current
        stream."""
        if len(pieces) < 2:
            return self._layout.view(self._bytes, pieces[0][0] if pieces else 0, num_tokens)
        return self._layout.view(torch.cat(self.parts(pieces)), 0, num_tokens)

    def close(self) -> None:
        """The memory itself goes with the last view of it."""
        self._read.clear()
        del self._bytes


def copy_sample(sample: FeatureSample, places: tuple[Tensor, Tensor]) -> None:
    """Onto a device, on the current stream, on which the sample's memory may be reused from then on (T2)."""
    for place, tensor in zip(places, (sample.input_ids, sample.hidden_TNH), strict=True):
        # The stream says nothing about the memory of a host; what is not pinned has been read on return, though.
        pinned = tensor.is_cpu and tensor.is_pinned()
        place.copy_(tensor, non_blocking=not pinned)


def copied_aside(sample: FeatureSample, layout: Layout, device: torch.device) -> Tensor:
    """uint8 [bytes of the block] on ``device``: a copy as it lies in a block, made on the current stream."""
    num_tokens = len(sample.input_ids)
    aside = torch.empty(layout.block_bytes(num_tokens), dtype=torch.uint8, device=device)
    copy_sample(sample, layout.view(aside, 0, num_tokens))
    return aside


def _overlap(left: Range, right: Range) -> bool:
    return left[0] < right[1] and right[0] < left[1]
