"""Prompts with images, as vLLM takes them."""

import pytest

from spec_core.errors import DataError
from spec_core.records import ImageSource
from spec_engine_vllm.image_prompts import ImagePrompts, one_token_each
from spec_kit.hosting import image_fields
from spec_kit.targets import read_target

from ...image_requests import picture, request_of
from ...seeing_targets import ALL_SEEING, IMAGE_ID


@pytest.mark.parametrize("model_type", ALL_SEEING)
def test_each_image_has_one_token_and_its_pixels(seeing_target, model_type) -> None:
    folder, pictures = seeing_target(model_type), [picture((33, 47)), picture((8, 8)), picture((8, 90))]
    request = request_of(folder, pictures)
    prompt = ImagePrompts(folder).prompt(request.input_ids, [image_fields(image) for image in request.images])
    ids = prompt["prompt_token_ids"]
    assert ids.count(IMAGE_ID) == 3 < request.input_ids.count(IMAGE_ID)
    put_there = {IMAGE_ID, *(read_target(folder).image_ends or ())}
    assert [token for token in ids if token not in put_there] == [
        token for token in request.input_ids if token not in put_there
    ]
    shown = prompt["multi_modal_data"]["image"]
    assert [image.tobytes() for image in shown] == [image.tobytes() for _, image in pictures]


@pytest.mark.parametrize(
    ("token_ids", "counts", "expected"),
    [
        ([1, 9, 9, 2, 9, 3], (2, 1), [1, 9, 2, 9, 3]),
        ([9, 9, 9], (1, 2), [9, 9]),  # images that touch
        ([1, 9, 2], (3,), [1, 9]),  # not the image's: vLLM will run other tokens, which is noticed
        ([1, 2], (), [1, 2]),
    ],
)
def test_tokens_of_an_image_become_one(token_ids, counts, expected) -> None:
    assert one_token_each(token_ids, 9, counts) == expected


@pytest.mark.parametrize("kind", [list, tuple])
def test_tokens_around_an_image_are_left_to_vllm(kind) -> None:
    """Only those that touch it: others are the text's."""
    token_ids = kind([7, 7, 9, 9, 8, 7, 9, 8, 8, 7, 5, 8])
    assert one_token_each(token_ids, 9, (2, 1), (7, 8)) == [7, 9, 9, 8, 7, 5, 8]


def test_a_file_that_has_changed_is_refused(seeing_target, tmp_path) -> None:
    folder, (source, image) = seeing_target("qwen3_vl"), picture((24, 24))
    file = tmp_path / "a.png"
    file.write_bytes(source.data)
    request = request_of(folder, [(source, image)])
    named = image_fields(ImageSource.of_file(str(file)))
    prompts = ImagePrompts(folder)
    assert prompts.prompt(request.input_ids, [named])["prompt_token_ids"].count(IMAGE_ID) == 1
    file.write_bytes(picture((24, 24), seed=1)[0].data)
    with pytest.raises(DataError, match="has changed since the data was read"):
        prompts.prompt(request.input_ids, [named])
