"""Encode and decode the images of a request in the messages to an engine's program."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from spec_core.records import ImageSource

if TYPE_CHECKING:
    from spec_kit.hosting.modes import Fields


def image_fields(image: ImageSource) -> Fields:
    """Return the fields of a message for an image, with ``data`` in base64."""
    return {"digest": image.digest, "path": image.path, "data": base64.b64encode(image.data).decode()}


def image_of_fields(fields: Fields) -> ImageSource:
    """Return the image from the fields that ``image_fields`` has returned."""
    data = base64.b64decode(fields["data"])
    return ImageSource(digest=fields["digest"], path=fields["path"], data=data)
