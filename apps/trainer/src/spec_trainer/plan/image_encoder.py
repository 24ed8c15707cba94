"""ImageEncoder has the sizes of a target's image encoder, from which the least memory of a forward pass follows.

The sizes come from the target's files alone; neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path
from typing import Any

from spec_core import read_json_object
from spec_core.errors import TargetError
from spec_kit.targets import StoredTensor, stored_tensors

_PARTS = frozenset({"visual", "vision_tower", "embed_vision"})
"""Names of the modules that turn pixels into embeddings, as they occur in the names of stored tensors."""
_PIXEL_BYTES = 4
"""Bytes of a value of a prepared image, which is float32."""


@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """Sizes of an image encoder, a stack of layers over the patches of an image."""

    tensors: Mapping[str, StoredTensor]
    """The encoder's tensors in the target's files, by name."""
    width: int
    """Number of values of a patch between two layers."""
    inner: int
    """Number of values of a patch after the first products of a layer's MLP, whose gate counts, too."""
    patch_values: int
    """Number of pixel values of a patch."""
    patches_per_token: int
    most_tokens: int | None
    """Tokens of the largest square image that the image processor does not scale down; None without a limit."""

    def pixel_bytes(self, num_tokens: int) -> int:
        """Return the number of bytes of the prepared pixels of images with ``num_tokens`` tokens in all."""
        return num_tokens * self.patches_per_token * self.patch_values * _PIXEL_BYTES

    def activation_bytes(self, num_tokens: int, itemsize: int, num_ranks: int = 1) -> int:
        """Return the least number of bytes of activations of a forward pass over an image with ``num_tokens`` tokens.

        While a layer's MLP computes, the layer's input, the normalised input and the MLP's inner values exist. Ranks
        divide the inner values.
        """
        values = 2 * self.width + self.inner // num_ranks
        return num_tokens * self.patches_per_token * values * itemsize


def read_image_encoder(folder: Path) -> ImageEncoder | None:
    """Return the sizes of the image encoder of the target in ``folder``; None if the files do not name them."""
    tensors = {
        name: stored
        for name, stored in stored_tensors(folder).items()
        if not _PARTS.isdisjoint(name.split("."))
    }
    vision = _section(folder, "config.json", "vision_config")
    width: Any = vision.get("hidden_size")
    inner: Any = vision.get("intermediate_size")
    merged: Any = vision.get("spatial_merge_size", vision.get("pooling_kernel_size"))
    patch_values: Any = next(
        (
            prod(stored.shape[1:])
            for name, stored in tensors.items()
            if name.endswith("proj.weight") and ".patch_embed" in name and stored.shape[0] == width
        ),
        None,
    )
    sizes = (width, inner, merged, patch_values)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    gated = any(".gate_proj." in name for name in tensors)
    return ImageEncoder(
        tensors=tensors,
        width=width,
        inner=inner * (2 if gated else 1),
        patch_values=patch_values,
        patches_per_token=merged**2,
        most_tokens=_most_tokens(folder, vision.get("patch_size"), merged),
    )


def _most_tokens(folder: Path, patch_size: Any, merged: int) -> int | None:
    images = _section(folder, "processor_config.json", "image_processor")
    images = images or _section(folder, "preprocessor_config.json")
    if isinstance(tokens := images.get("max_soft_tokens"), int):
        return tokens
    size = images.get("size")
    area = images.get("max_pixels") or (size.get("longest_edge") if isinstance(size, dict) else None)
    if not (isinstance(area, int) and isinstance(patch_size, int) and patch_size > 0):
        return None
    return (isqrt(area) // (patch_size * merged)) ** 2


def _section(folder: Path, name: str, section: str | None = None) -> Mapping[str, Any]:
    """Return an object of a JSON file, or the whole file; empty if there is none."""
    if not (folder / name).is_file():
        return {}
    fields = read_json_object(folder / name, TargetError)
    found = fields if section is None else fields.get(section)
    return found if isinstance(found, dict) else {}
