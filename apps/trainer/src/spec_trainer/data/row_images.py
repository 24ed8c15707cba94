"""Read the images of rows, check that they can be used, and count their tokens."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from spec_core import TargetSpec
from spec_core.errors import DataError
from spec_core.records import ImageSource
from spec_core.wording import printable, shortened, shown
from spec_kit.targets import TargetImages, decoded_image
from spec_kit.targets.target_images import media_type
from spec_trainer.data.errors import BadRow, check_machine
from spec_trainer.data.image_parts import TEXT_ONLY, TEXT_PROMPTS, reference_name

_BAD = "bad image"
_PROBLEM = 500
"""Largest number of characters of the description of a problem, which may hold a path."""
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://|https?:", re.IGNORECASE)
"""An address of the network, such as https://…"""


@dataclass(frozen=True)
class ImageRules:
    """Whether the rows of a run may have images."""

    token_id: int | None = None
    """The target's image token (``TargetSpec.image_token_id``); None if the target is not multimodal."""
    ends: tuple[int, int] | None = None
    """Tokens that enclose an image (``TargetSpec.image_ends``), if the target has them."""
    refused: str = TEXT_ONLY
    """Reason for refusing rows with images; empty if such rows are allowed."""

    @classmethod
    def of(cls, target: TargetSpec, refused: str) -> ImageRules:
        """Return the rules for a multimodal target.

        ``refused``: why rows with images are refused; empty if they are allowed.
        """
        return cls(target.image_token_id, target.image_ends, refused)


NO_IMAGES = ImageRules()
NO_PROMPT_IMAGES = ImageRules(refused=TEXT_PROMPTS)


class RowImages:
    """Reads images of rows for one target."""

    def __init__(self, media_root: str | None, target_folder: Path) -> None:
        """Prepare to read images below the folder ``media_root``; if it is None, no file is read."""
        self._files = ImageFiles(media_root)
        self._target = TargetImages(target_folder)

    def read(self, references: Sequence[Any]) -> list[tuple[ImageSource, int]]:
        """Return the source of each image of a row, and its number of tokens.

        ``references``: the images as the row gives them (path, URI or bytes). Raise BadRow if one cannot be
        used.
        """
        # One at a time: the pixels of a row's images are never in memory together.
        return [self._read(number, reference) for number, reference in enumerate(references, start=1)]

    def _read(self, number: int, reference: Any) -> tuple[ImageSource, int]:
        with _as_bad_row(number, reference):
            source = self._files.source(reference)
            return source, self._target.num_tokens(decoded_image(source.read()))


class ImageFiles:
    """Finds the images that rows give as path, URI or bytes, for any target."""

    def __init__(self, media_root: str | None) -> None:
        """Prepare to read images below the folder ``media_root``; if it is None, no file is read."""
        self._root = None if media_root is None else os.path.realpath(os.path.expanduser(media_root))

    def data_uri(self, number: int, reference: Any) -> str:
        """Return an image as a data: URI; raise BadRow if the image cannot be used.

        ``number``: index of the image in the row, for the error's message.
        """
        with _as_bad_row(number, reference):
            data = self.source(reference).read()
            decoded_image(data)
            return _data_uri(data)

    def source(self, reference: Any) -> ImageSource:
        """Return the source of an image. Raise DataError if the reference is malformed or not allowed.

        A reference is the path, URI, bytes or object by which a row gives an image.
        """
        reference = _inner(reference)
        if isinstance(reference, bytes):
            return ImageSource.of_data(reference)
        if not isinstance(reference, str) or not reference:
            raise DataError("expected a path below data.media_root, a data: URI, or bytes")
        if reference[:5].lower() == "data:":
            return ImageSource.of_data(_data_of(reference))
        if _ADDRESS.match(reference):
            raise DataError("nothing is downloaded; save the image below data.media_root and name its path")
        return ImageSource.of_file(self._path(reference))

    def _path(self, reference: str) -> str:
        """Return the real path of a file below ``data.media_root``. Raise DataError for any other path."""
        if self._root is None:
            raise DataError("set data.media_root to the folder of the images")
        name = unquote(reference.removeprefix("file://")) if reference.startswith("file://") else reference
        try:
            path = os.path.realpath(os.path.join(self._root, name))
        except ValueError as error:  # a null character
            raise DataError(f"not a path: {error}") from None
        if os.path.commonpath([path, self._root]) != self._root:
            raise DataError(f"it lies outside data.media_root={shown(self._root)}")
        return path


@contextmanager
def _as_bad_row(number: int, reference: object) -> Iterator[None]:
    """Turn a DataError of the ``with`` block into a BadRow; the message has the image's index, ``number``."""
    try:
        yield
    except BadRow:
        raise
    except DataError as error:
        check_machine(error)
        problem = printable(shortened(str(error), _PROBLEM).replace("\n", " "))
        raise BadRow(_BAD, f"image {number}, {reference_name(reference)}: {problem}") from error


def _inner(reference: Any) -> Any:
    """Return the bytes, URI or path of an image, also if a Parquet or OpenAI object holds it; else None."""
    if not isinstance(reference, Mapping):
        return reference
    found = [reference[key] for key in ("bytes", "url", "path") if reference.get(key) is not None]
    return found[0] if found else None


def written_images(references: Sequence[Any]) -> list[str]:
    """Return a row's images as text for a JSON row: paths, or data: URIs of the bytes."""
    named = map(_inner, references)
    return [_data_uri(one) if isinstance(one, bytes) else str(one) for one in named]


def _data_uri(data: bytes) -> str:
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def _data_of(uri: str) -> bytes:
    """Return the bytes of a data: URI (RFC 2397) of an image in base64."""
    kind, comma, content = uri[5:].partition(",")
    media, *options = kind.lower().split(";")
    if not comma or not media.startswith("image/") or "base64" not in options:
        raise DataError("expected a data: URI that begins with data:image/…;base64,")
    try:
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"its base64 is damaged: {error}") from None
