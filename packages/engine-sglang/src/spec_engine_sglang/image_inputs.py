"""ImageInputs prepares images in the form in which SGLang takes prepared images.

SGLang's own preparation decodes the prompt's tokens and encodes the text again, which may yield other tokens.
If the images are prepared, SGLang uses the token ids unchanged (function ``load_mm_data``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from spec_core import TargetSpec
from spec_core.errors import EngineError
from spec_kit.hosting import Fields, image_of_fields
from spec_kit.targets import TargetImages, decoded_image, read_target


class ImageInputs:
    """Prepares images for one target. It reads the target's folder for the first images."""

    def __init__(self, folder: Path) -> None:
        """Prepare images for the target in ``folder``."""
        self._folder = folder
        self._images = TargetImages(folder)

    def item(self, token_ids: Sequence[int], images: Sequence[Fields]) -> Fields | None:
        """Return an element of SGLang's ``image_data`` with all images of a request; None without images.

        Raise DataError if an image cannot be read, and EngineError if the tokens do not match the images.
        """
        if not images:
            return None
        pictures = [decoded_image(image_of_fields(image).read()) for image in images]
        counts = [self._images.num_tokens(picture) for picture in pictures]
        assert self._target.image_token_id is not None
        offsets = image_offsets(token_ids, self._target.image_token_id, counts)
        return {"format": "processor_output", **self._images.arrays(pictures), "offsets": offsets}

    @cached_property
    def _target(self) -> TargetSpec:
        return read_target(self._folder)


def image_offsets(
    token_ids: Sequence[int], image_token_id: int, counts: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the indices of each image's first and last token; image i has ``counts[i]`` tokens.

    Raise EngineError if ``token_ids`` has fewer or more image tokens.
    """
    places = [place for place, token in enumerate(token_ids) if token == image_token_id]
    if len(places) != sum(counts):
        raise EngineError(
            f"a sample has {len(places)} tokens for images, expected {sum(counts)}; install the same version of "
            "transformers for the engine and the trainer"
        )
    firsts = [0, *accumulate(counts)][:-1]
    return [(places[first], places[first + count - 1]) for first, count in zip(firsts, counts, strict=True)]
