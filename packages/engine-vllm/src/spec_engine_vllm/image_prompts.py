"""ImagePrompts makes prompts with images in the form that vLLM takes.

vLLM takes one placeholder token for each image, and replaces it by as many tokens as vLLM's own preprocessing
of images computes. The connector compares the result with the trainer's token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from spec_core import TargetSpec
from spec_kit.hosting import Fields, image_of_fields
from spec_kit.targets import TargetImages, decoded_image, read_target


class ImagePrompts:
    """Makes prompts for one target. It reads the target's folder for the first prompt."""

    def __init__(self, folder: Path) -> None:
        """Make prompts for the target in ``folder``."""
        self._folder = folder
        self._images = TargetImages(folder)

    def prompt(self, token_ids: Sequence[int], images: Sequence[Fields]) -> dict[str, Any]:
        """Return vLLM's prompt. ``images``: the fields of each ImageSource, with ``data`` in base64.

        Raise DataError if an image cannot be read, or has changed since the request was made.
        """
        pictures = [decoded_image(image_of_fields(image).read()) for image in images]
        counts = [self._images.num_tokens(picture) for picture in pictures]
        assert self._target.image_token_id is not None
        return {
            "prompt_token_ids": one_token_each(
                token_ids, self._target.image_token_id, counts, self._target.image_ends
            ),
            "multi_modal_data": {"image": pictures},
        }

    @cached_property
    def _target(self) -> TargetSpec:
        return read_target(self._folder)


def one_token_each(
    token_ids: Sequence[int],
    image_token_id: int,
    counts: Iterable[int],
    ends: tuple[int, int] | None = None,
) -> list[int]:
    """Return the token ids with only one placeholder token for each image.

    Image i has ``counts[i]`` placeholder tokens in ``token_ids``. The tokens ``ends``, which begin and end an
    image, are left out, because vLLM inserts them itself.
    """
    token_ids = list(token_ids)
    left = iter(counts)
    short = list[int]()
    position = 0
    while position < len(token_ids):
        if token_ids[position] != image_token_id:
            short.append(token_ids[position])
            position += 1
            continue
        position += next(left, 1)
        if ends and short[-1:] == [ends[0]] and token_ids[position : position + 1] == [ends[1]]:
            short.pop()
            position += 1
        short.append(image_token_id)
    return short
