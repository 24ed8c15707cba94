"""Requests with images, and the states that a target computes for them."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from spec_core.records import CaptureRequest, ImageSource
from spec_testing import SampleWithImages

from .seeing_targets import IMAGE, IMAGE_ID, MERGE


def picture(size: tuple[int, int], seed: int = 0) -> tuple[ImageSource, Image.Image]:
    """Return an encoded random picture, and its pixels."""
    pixels = np.random.default_rng((*size, seed)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image, file = Image.fromarray(pixels), BytesIO()
    image.save(file, "PNG")
    return ImageSource.of_data(file.getvalue()), image


def request_of(folder: Path, pictures: Sequence[tuple[ImageSource, Image.Image]]) -> CaptureRequest:
    """Return a request as the model's own documentation makes one: a placeholder for each of an image's rows."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    text = "<|im_start|>user\nSee: "
    for _, image in pictures:
        num_rows = num_rows_of(processor([image], return_tensors="pt"))
        text += "<|vision_start|>" + IMAGE * num_rows + "<|vision_end|> and "
    ids = tuple(tokenizer(text + "what?<|im_end|>\n")["input_ids"])
    images = tuple(source for source, _ in pictures)
    return CaptureRequest(request_id=0, input_ids=ids, images=images, destinations=())


def num_rows_of(prepared: Mapping[str, Any]) -> int:
    """Return the number of tokens of one image, as its image processor has prepared it."""
    if "image_grid_thw" in prepared:
        return int(prepared["image_grid_thw"][0].prod()) // MERGE**2
    return int(prepared["num_soft_tokens_per_image"][0])


def arrays_of(
    folder: Path, ids: Tensor, pictures: Sequence[tuple[ImageSource, Image.Image]]
) -> dict[str, Tensor]:
    """Return the arguments of a model's forward pass that come of the pictures."""
    import transformers

    if not pictures:
        return {}
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    arrays = dict(processor([image for _, image in pictures], return_tensors="pt"))
    arrays.pop("num_soft_tokens_per_image", None)
    return {**arrays, "mm_token_type_ids": (ids == IMAGE_ID).int()}


def reference_states(
    folder: Path,
    request: CaptureRequest,
    pictures: Sequence[tuple[ImageSource, Image.Image]],
    **arguments: Tensor,
) -> Tensor:
    """Return every layer's input and the final norm's, [T, N + 1, H], from the whole model with its own positions.

    ``arguments`` are further ones of its forward pass.
    """
    import torch
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    seen: list[Tensor] = []
    stack = model.model.language_model
    for part in (*stack.layers, stack.norm):
        part.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"])[0].clone()),
            with_kwargs=True,
        )
    ids = torch.tensor([request.input_ids])
    with torch.no_grad():
        model(ids, **arrays_of(folder, ids, pictures), **arguments)
    return torch.stack(seen, dim=1)


def samples_with_images(
    folder: Path, shown: Sequence[Sequence[tuple[ImageSource, Image.Image]]]
) -> list[SampleWithImages]:
    """Return a sample for each list of pictures, with the states that Transformers computes."""
    from spec_testing import SampleWithImages

    requests = [request_of(folder, pictures) for pictures in shown]
    return [
        SampleWithImages(
            input_ids=request.input_ids,
            images=tuple(image.data for image in request.images),
            hidden_TNH=reference_states(folder, request, pictures),
        )
        for request, pictures in zip(requests, shown, strict=True)
    ]


def question(text: str, pictures: Sequence[tuple[ImageSource, Image.Image]]) -> dict[str, Any]:
    """Return a user's message in OpenAI's form, with the pictures as data: URIs."""
    urls = ["data:image/png;base64," + base64.b64encode(source.data).decode() for source, _ in pictures]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
