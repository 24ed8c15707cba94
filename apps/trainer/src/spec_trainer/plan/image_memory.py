"""Compute a lower bound of the memory that an engine needs for images: its image encoder, and the pixels.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spec_trainer.plan.image_encoder import read_image_encoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spec_kit.targets import StoredTensor
    from spec_trainer.run.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class ImageBytes:
    """Bytes that one engine needs for images."""

    encoder: Mapping[str, StoredTensor]
    """The image encoder's stored tensors, by name."""
    activations: int
    """Bytes of activations of the image encoder while it runs on the largest image."""
    pixels: int
    """Bytes of the prepared pixels of the row, or of the image, on which the image encoder runs then."""


def image_bytes(run: RunSpec, itemsize: int) -> ImageBytes | None:
    """Return the bytes that an engine needs for images; None if the target has no image encoder.

    ``itemsize``: bytes of a value in the engine's compute dtype. Without images in the data, an engine needs the
    encoder's weights alone, unless it runs the encoder on the largest image when it starts.
    """
    target = run.target
    engine = run.config.engine
    sees = target.image_token_id is not None and run.config.data.features is None
    if not sees or (encoder := read_image_encoder(target.folder)) is None:
        return None

    def needed(largest: int, tokens: int) -> tuple[int, int]:
        ranks = engine.tensor_parallel
        return encoder.activation_bytes(largest, itemsize, ranks), encoder.pixel_bytes(tokens)

    passes = [needed(*counts) for counts in _image_tokens(run, target.image_token_id)]
    on_device = run.backend.capabilities().device_bytes is not None
    if on_device and encoder.most_tokens and run.engine_type.runs_largest_image(engine):
        passes.append(needed(encoder.most_tokens, encoder.most_tokens))
    activations, pixels = max(passes, key=sum, default=(0, 0))
    return ImageBytes(encoder=encoder.tensors, activations=activations, pixels=pixels)


def _image_tokens(run: RunSpec, image_token_id: int | None) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens of the largest image, and of all images, of each sample with images."""
    for sample in run.dataset.samples:
        if sample.images:
            shown = np.concatenate(([0], sample.input_ids == image_token_id, [0]))
            starts, ends = (np.flatnonzero(np.diff(shown) == sign) for sign in (1, -1))
            yield int((ends - starts).max()), int((ends - starts).sum())
