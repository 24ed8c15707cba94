"""BucketPlan lays out an update's tensors in buckets: blocks of bytes that a weight transport sends.

Sender and receiver derive the same plan from the manifest. A tensor that fits into a bucket is stored in one
bucket, at a multiple of ``ALIGNMENT``, so that it can be viewed in its dtype. A larger tensor is split, and
joined by the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from torch import Tensor

    from spec_core import Manifest
    from spec_core.weight_manifest import TensorEntry

ALIGNMENT = 256
"""Alignment of tensors in bytes: a multiple of every dtype's size, at which devices copy fast."""


@dataclass(frozen=True, kw_only=True)
class BucketPiece:
    """Bytes ``start`` to ``start + size`` of a tensor, at ``offset`` of its bucket."""

    entry: TensorEntry
    start: int
    size: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """The pieces of each bucket, in the order in which buckets are sent."""

    pieces: Sequence[Sequence[BucketPiece]]
    bucket_bytes: int
    """Size of the largest bucket in bytes."""

    @classmethod
    def of(cls, manifest: Manifest, bucket_bytes: int) -> BucketPlan:
        """Return the plan for buckets of at most ``bucket_bytes`` bytes; a bucket is no larger than needed."""
        limit = max(ALIGNMENT, bucket_bytes // ALIGNMENT * ALIGNMENT)
        pieces: list[list[BucketPiece]] = [[]]
        used = 0
        for entry in manifest.tensors:
            for start in range(0, max(1, entry.num_bytes), limit):
                size = min(limit, entry.num_bytes - start)
                if start > 0 or used + min(limit, entry.num_bytes) > limit:
                    pieces.append([])
                    used = 0
                pieces[-1].append(BucketPiece(entry=entry, start=start, size=size, offset=used))
                used += _aligned(size)
        return cls(pieces=pieces, bucket_bytes=max(map(bucket_size, pieces)))

    def pack(self, weights: Mapping[str, Tensor], bucket: Tensor) -> Generator[Tensor]:
        """Yield each bucket as a uint8 view of ``bucket``, which the next ``next()`` overwrites."""
        import torch

        for pieces in self.pieces:
            for piece in pieces:
                raw = weights[piece.entry.name].detach().contiguous().reshape(-1).view(torch.uint8)
                bucket[piece.offset : piece.offset + piece.size].copy_(
                    raw[piece.start : piece.start + piece.size]
                )
            yield bucket[: bucket_size(pieces)]

    def unpack(self, buckets: Iterable[Tensor]) -> Generator[tuple[str, Tensor]]:
        """Yield each tensor in ``buckets`` with its name: a view of its bucket, or a copy if it was split."""
        import torch

        whole = torch.empty(0, dtype=torch.uint8)
        for pieces, bucket in zip(self.pieces, buckets, strict=True):
            for piece in pieces:
                entry = piece.entry
                raw = bucket[piece.offset : piece.offset + piece.size]
                if piece.size < entry.num_bytes:
                    if piece.start == 0:
                        whole = torch.empty(entry.num_bytes, dtype=torch.uint8, device=bucket.device)
                    whole[piece.start : piece.start + piece.size].copy_(raw)
                    raw = whole
                if piece.start + piece.size == entry.num_bytes:
                    yield entry.name, raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def bucket_size(pieces: Sequence[BucketPiece]) -> int:
    """Return the size in bytes of a bucket with these pieces, a multiple of ``ALIGNMENT``."""
    return _aligned(pieces[-1].offset + pieces[-1].size) if pieces else 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
