"""Images, as SGLang takes them prepared."""

import pytest
import torch
import transformers

from spec_core.errors import DataError, EngineError
from spec_core.records import ImageSource
from spec_engine_sglang.image_inputs import ImageInputs, image_offsets
from spec_kit.hosting import image_fields

from ...image_requests import picture, request_of
from ...seeing_targets import IMAGE_ID, SEEING


@pytest.mark.parametrize("model_type", SEEING)
def test_an_item_has_the_pixels_and_the_places_of_all_images(seeing_target, model_type) -> None:
    folder, pictures = seeing_target(model_type), [picture((33, 47)), picture((8, 8)), picture((8, 90))]
    request = request_of(folder, pictures)
    item = ImageInputs(folder).item(request.input_ids, [image_fields(image) for image in request.images])
    assert item is not None
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    expected = processor([image for _, image in pictures], return_tensors="pt")
    for name in ("pixel_values", "image_grid_thw"):
        torch.testing.assert_close(item[name], expected[name], rtol=0, atol=0)
    places = [place for first, last in item["offsets"] for place in range(first, last + 1)]
    assert places == [place for place, token in enumerate(request.input_ids) if token == IMAGE_ID]
    assert len(item["offsets"]) == 3


def test_no_images_are_no_item(seeing_target) -> None:
    assert ImageInputs(seeing_target("qwen3_vl")).item([1, 2], []) is None


@pytest.mark.parametrize(
    ("token_ids", "counts", "expected"),
    [
        ([1, 9, 9, 2, 9, 3], (2, 1), [(1, 2), (4, 4)]),
        ([9, 9, 9], (1, 2), [(0, 0), (1, 2)]),  # images that touch
        ([1, 2], (), []),
    ],
)
def test_each_image_has_its_places(token_ids, counts, expected) -> None:
    assert image_offsets(token_ids, 9, counts) == expected


def test_other_tokens_than_the_images_are_refused() -> None:
    with pytest.raises(EngineError, match="1 tokens for images, expected 3; install the same version"):
        image_offsets([1, 9, 2], 9, (3,))


def test_a_file_that_has_changed_is_refused(seeing_target, tmp_path) -> None:
    folder, (source, image) = seeing_target("qwen3_vl"), picture((24, 24))
    file = tmp_path / "a.png"
    file.write_bytes(source.data)
    request = request_of(folder, [(source, image)])
    named = image_fields(ImageSource.of_file(str(file)))
    file.write_bytes(picture((24, 24), seed=1)[0].data)
    with pytest.raises(DataError, match="has changed since the data was read"):
        ImageInputs(folder).item(request.input_ids, [named])
