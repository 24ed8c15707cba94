"""TargetImages prepares images with the target's own image processor, and counts their tokens.

The image processor is transformers' version that computes with Pillow and numpy. So torchvision is not needed, and
every machine computes the same values.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

from PIL import Image, ImageOps

from spec_core import foreign_errors, read_json_object
from spec_core.errors import DataError, TargetError
from spec_core.foreign import cause, check_regular
from spec_core.wording import shown
from spec_kit.targets.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Accepted image formats, by Pillow's names; for some other formats Pillow would start external programs."""
_MOST_PIXELS = 89_478_485
"""Most pixels of an image: Pillow's own limit, beyond which it warns of decompression bombs."""
_TOO_MANY = f"expected at most {_MOST_PIXELS} in all"
_MOST_TOKENS = 1 << 20
"""Most tokens of an image; the largest image that is read has a tenth of them with patches of 28 x 28 pixels."""
_ANIMATED = ("PNG", "WEBP", "GIF")
_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_CONFIG_BYTES = 1 << 20
_SIZES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
    "pooling_kernel_size": "pooling_kernel_size",
}
"""Size of the image processor -> the field of ``vision_config`` that has the same size."""
_NUM_TOKENS = "num_soft_tokens_per_image"
"""Name that Gemma 4's image processor gives to the number of tokens of each image."""


class TargetImages:
    """Prepares images for one target. The image processor is loaded with the first image."""

    def __init__(self, folder: Path) -> None:
        """Prepare images with the image processor in ``folder``."""
        self._folder = folder

    def num_tokens(self, image: Image.Image) -> int:
        """Return the number of tokens of an image.

        Raise DataError if the image processor refuses the image, or makes no token or too many of it.
        """
        image_processor = self._image_processor
        with _refusals():
            if _counts_patches(image_processor):
                patches = image_processor.get_number_of_image_patches(image.height, image.width, {})
                num_tokens = int(patches) // image_processor.merge_size**2
            else:
                num_tokens = int(image_processor(images=[image])[_NUM_TOKENS][0])
        if not 0 < num_tokens <= _MOST_TOKENS:
            raise DataError(
                f"{num_tokens} tokens by the sizes in {_CONFIGS[0]} of the target, expected 1 to {_MOST_TOKENS}"
            )
        return num_tokens

    def arrays(self, images: Sequence[Image.Image]) -> Mapping[str, Tensor]:
        """Return the arguments of the target's forward pass for these images. Raise DataError if refused."""
        with _refusals():
            arrays = dict(self._image_processor(images=list(images), return_tensors="pt"))
        arrays.pop(_NUM_TOKENS, None)
        return arrays

    @cached_property
    def _image_processor(self) -> Any:
        with foreign_errors(TargetError, f"the image processor in '{self._folder}' cannot be read"):
            from transformers import AutoImageProcessor

            for name in _CONFIGS:
                if (self._folder / name).exists():
                    check_regular(self._folder / name, TargetError, _CONFIG_BYTES)
            image_processor = AutoImageProcessor.from_pretrained(
                str(self._folder), local_files_only=True, trust_remote_code=False, backend="pil"
            )
        known = getattr(image_processor, "model_input_names", ())
        if not _counts_patches(image_processor) and _NUM_TOKENS not in known:
            raise TargetError(
                f"the image processor in '{self._folder}', {type(image_processor).__name__}, does not say how many "
                "tokens an image takes; train on text alone"
            )
        self._check_sizes(image_processor)
        self._check_scales(image_processor)
        return image_processor

    def _check_scales(self, image_processor: Any) -> None:
        """Raise TargetError if pixels cannot be scaled, or become values that are not finite."""
        for name in ("image_mean", "image_std", "rescale_factor"):
            value = getattr(image_processor, name, None)
            parts = value if isinstance(value, list | tuple) and len(value) == len("RGB") else [value]
            if value is not None and not all(_is_scale(part, name) for part in parts):
                raise TargetError(
                    f"the image processor in '{self._folder}' has {name}={shown(value)}, expected a number, or one "
                    "for each colour; take the complete folder of the target"
                )

    def _check_sizes(self, image_processor: Any) -> None:
        """Raise TargetError if the image processor cuts images into other patches than the target takes."""
        vision: object = read_json_object(self._folder / "config.json", TargetError).get("vision_config")
        if not isinstance(vision, dict):
            return
        for name, field in _SIZES.items():
            size = getattr(image_processor, name, None)
            expected = cast("dict[str, object]", vision).get(field)
            if expected is not None and hasattr(image_processor, name) and size != expected:
                raise TargetError(
                    f"the image processor in '{self._folder}' has {name}={shown(size)}, expected {shown(expected)}, "
                    f"which is vision_config.{field} in config.json; take the complete folder of the target"
                )


@contextmanager
def _refusals() -> Generator[None]:
    """Raise DataError for any error of the image processor, and hide what it logs about odd images."""
    with quiet_transformers(), foreign_errors(DataError, "refused by the target's image processor"):
        yield


def _is_scale(value: object, name: str) -> bool:
    """Return whether ``value`` is a finite number, and above 0 unless it is a mean."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and (name == "image_mean" or value > 0)


def _counts_patches(image_processor: Any) -> bool:
    return all(hasattr(image_processor, name) for name in ("get_number_of_image_patches", "merge_size"))


def decoded_image(data: bytes) -> Image.Image:
    """Return an encoded image as RGB, upright and on white, as vLLM's servers decode it.

    Raise DataError if it is damaged, animated, of another format than ``FORMATS``, or larger than Pillow's limit.
    """
    try:
        # Pillow also warns of damaged metadata, which do not matter for the pixels.
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(BytesIO(data), formats=FORMATS)
            if image.width * image.height > _MOST_PIXELS:
                raise DataError(f"{image.width}x{image.height} pixels, {_TOO_MANY}")
            if image.format in _ANIMATED and getattr(image, "is_animated", False):
                raise DataError("the image is animated; give one of its frames")
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode != "RGBA":
                return image.convert("RGB")
            ground = Image.new("RGB", image.size, (255, 255, 255))
            ground.paste(image, mask=image.getchannel("A"))
            return ground
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(f"too many pixels, {_TOO_MANY}") from None
    except Image.UnidentifiedImageError:
        raise DataError(f"not an image of one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:
        raise DataError(f"the image cannot be decoded: {cause(error)}") from error


def media_type(data: bytes) -> str:
    """Return the media type, such as image/png, of an encoded image that ``decoded_image`` accepts."""
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        return Image.MIME[image.format or ""]
