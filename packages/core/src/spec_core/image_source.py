"""An ImageSource has the path or the bytes of a sample's image, and a digest that identifies it.

A PromptWithImages is a prompt with images, and with a placeholder token for each embedding of an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from spec_core.errors import DataError
from spec_core.foreign import read_bytes

MOST_IMAGE_BYTES = 64 << 20
"""Largest number of bytes of one encoded image."""
MOST_IMAGES = 64
"""Largest number of images of one sample."""


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """An encoded image, such as a JPEG: the file that holds it, or the bytes themselves."""

    digest: str
    """BLAKE2b of the encoded bytes, 16 bytes as hexadecimal digits."""
    path: str = ""
    """Absolute path of the file; empty if ``data`` holds the image."""
    data: bytes = b""

    @classmethod
    def of_file(cls, path: str) -> ImageSource:
        """Return the source of the image in a file. Raise DataError if the file cannot be read."""
        return cls(digest=_digest(read_bytes(Path(path), DataError, MOST_IMAGE_BYTES)), path=path)

    @classmethod
    def of_data(cls, data: bytes) -> ImageSource:
        """Return the source of an image that is in memory. Raise DataError if it is too large."""
        if len(data) > MOST_IMAGE_BYTES:
            raise DataError(f"an image has {len(data)} bytes, expected at most {MOST_IMAGE_BYTES}")
        return cls(digest=_digest(data), data=data)

    def read(self) -> bytes:
        """Return the encoded bytes. Raise DataError if the file is gone or holds other bytes than before."""
        if not self.path:
            return self.data
        data = read_bytes(Path(self.path), DataError, MOST_IMAGE_BYTES)
        if _digest(data) != self.digest:
            raise DataError(
                f"image {self.path} has changed since the data was read; run the same command again"
            )
        return data


@dataclass(frozen=True)
class PromptWithImages(Sequence[int]):
    """A prompt's token ids as a sequence, and its images. A slice of it has no images."""

    token_ids: tuple[int, ...]
    """The token ids; ``TargetSpec.image_token_id`` occurs once for each embedding of an image."""
    images: tuple[ImageSource, ...]
    """The images, in the order of their tokens."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        """Return one token id, or the token ids of a slice as a tuple."""
        return self.token_ids[index]


def images_of(prompt: Sequence[int]) -> tuple[ImageSource, ...]:
    """Return the images of a prompt; a plain sequence of token ids has none."""
    return prompt.images if isinstance(prompt, PromptWithImages) else ()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
