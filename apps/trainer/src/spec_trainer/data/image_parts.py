"""Find a conversation's images, which are parts of messages or in other fields of the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_core.records import MOST_IMAGES
from spec_core.wording import counted, shown
from spec_trainer.data.errors import BadRow

ROW_KEYS = ("image", "image_path", "images")
"""Fields of a row that hold one image or a list of them."""
TEXT_ONLY = "drafts are trained on text"
"""Reason for refusing images if the target is not multimodal."""
TEXT_PROMPTS = "prompts of text alone are answered"
"""Reason for refusing images in prompts that an engine answers."""
_KINDS = ("image", "image_url", "input_image")
_SOURCES = ("image", "image_url", "path", "url", "bytes")
_MARK = "<image>"
PART = {"type": "image"}
"""The content part that represents an image in messages for a chat template."""

Part = dict[str, Any]


def image_part(name: str, part: Mapping[str, Any]) -> Part | None:
    """Return the chat template's part for an image; None if ``part`` is not an image.

    If ``part`` gives the image (as a path, URL, bytes or object), the result has it under the key ``image``.
    Raise BadRow if ``part`` gives it more than once.
    """
    if part.get("type") not in _KINDS:
        return None
    given = {key: part[key] for key in _SOURCES if part.get(key) is not None}
    if len(given) > 1:
        raise BadRow("bad image", f"{name} has an image with {' and '.join(given)}; give one of them")
    return {**PART, "image": next(iter(given.values()))} if given else PART


def with_images(
    messages: list[dict[str, Any]], fields: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    """Return a conversation's messages with marks for its images, and the images in the same order.

    Each mark is the content part ``PART``; each image is a path, URL, bytes or object. Images may be in the
    row's fields (``ROW_KEYS``) instead of in the messages. They then take the places of image parts without
    an image, or of the marks ``<image>`` in users' messages. Without such places they precede the first
    user's text. Raise BadRow if images and places do not match.
    """
    messages = _with_row_images(messages, row_images(fields))
    references: list[Any] = []
    placed = []
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        found = [part for part in parts if part["type"] == "image"]
        if found and message["role"] != "user":
            raise BadRow(
                "bad image",
                f"message {index + 1} has an image and the role {message['role']!r}, expected 'user'",
            )
        if any("image" not in part for part in found):
            raise BadRow("bad image", f"message {index + 1} has the place of an image, and no image is given")
        references += [part["image"] for part in found]
        shorn = [PART if part["type"] == "image" else part for part in parts]
        placed.append({**message, "content": shorn} if found else message)
    if len(references) > MOST_IMAGES:
        raise BadRow("bad image", f"{len(references)} images in a row, expected at most {MOST_IMAGES}")
    return placed, tuple(references)


def count_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of images in the messages of a ``Chat``."""
    return sum(part == PART for message in messages for part in _parts(message))


def row_images(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the images in the row's field for images (``ROW_KEYS``), as paths, URLs, bytes or objects.

    Return none if the row has no such field. Raise BadRow if it has several.
    """
    given = {key: fields[key] for key in ROW_KEYS if fields.get(key) not in (None, [], "")}
    if len(given) > 1:
        raise BadRow("bad image", f"the row has {' and '.join(given)}; give one of them")
    for value in given.values():
        return tuple(value) if isinstance(value, list) else (value,)
    return ()


def _with_row_images(messages: list[dict[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    if not images:
        return messages
    places = sum(1 for message in messages for part in _parts(message) if part == PART)
    if places == 0:
        messages = _split_at_marks(messages)
        places = sum(1 for message in messages for part in _parts(message) if part == PART)
    if places == 0:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise BadRow("bad image", "the row has images and no message of a user")
        opened = {**messages[first], "content": [PART] * len(images) + _parts(messages[first])}
        messages = [*messages[:first], opened, *messages[first + 1 :]]
    elif places != len(images):
        raise BadRow(
            "bad image", f"{counted(len(images), 'image')} for {counted(places, 'place')} in the messages"
        )
    left = iter(images)
    return [
        {**message, "content": [{**PART, "image": next(left)} if part == PART else part for part in parts]}
        if PART in (parts := _parts(message))
        else message
        for message in messages
    ]


def _split_at_marks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace each mark ``<image>`` in users' messages, and a line break after it, by an image part."""
    return [
        {**message, "content": _at_marks(_parts(message))}
        if message["role"] == "user" and any(_MARK in part.get("text", "") for part in _parts(message))
        else message
        for message in messages
    ]


def _at_marks(parts: list[Part]) -> list[Part]:
    split: list[Part] = []
    for part in parts:
        if part["type"] != "text":
            split.append(part)
            continue
        first, *rest = part["text"].split(_MARK)
        split += [{"type": "text", "text": first}] if first else []
        for text in rest:
            split.append(PART)
            split += [{"type": "text", "text": own}] if (own := text.removeprefix("\n")) else []
    return split


def _parts(message: Mapping[str, Any]) -> list[Part]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def reference_name(reference: object) -> str:
    """Return the path, URL or object that gives an image as text for an error message.

    A long text is shortened.
    """
    if isinstance(reference, Mapping):
        reference = next((reference[key] for key in ("url", "path") if reference.get(key)), reference)
    return shown(reference if isinstance(reference, str) else type(reference).__name__)
