"""Multimodal targets are read from both forms of config.json, with the image processor of their folder."""

import json
import shutil
from dataclasses import replace

import pytest
import transformers
from PIL import Image

from spec_core.errors import DataError, TargetError
from spec_kit.targets import TargetImages, read_target
from spec_kit.targets.rope_parameters import draft_rope

from ....seeing_targets import GEMMA, IMAGE_ID, SEEING


@pytest.fixture
def copied(seeing_target, tmp_path):
    def copy(model_type="qwen2_5_vl"):
        return shutil.copytree(seeing_target(model_type), tmp_path / model_type)

    return copy


def flattened(config: dict) -> dict:
    """A config.json as Qwen2.5-VL's own: text values at the top, positions of images as a scaling."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def test_flat_config_is_read_as_the_nested_one(copied):
    folder = copied()
    nested = read_target(folder)
    assert (nested.model_type, nested.image_token_id) == ("qwen2_5_vl_text", IMAGE_ID)
    file = folder / "config.json"
    file.write_text(json.dumps(flattened(json.loads(file.read_text()))))
    flat = read_target(folder)
    assert flat.rope["rope_type"] == "default"
    same = {"rope": nested.rope, "digest": nested.digest}
    assert {**nested.rope, **flat.rope} == {**flat.rope, **nested.rope}
    assert replace(flat, **same) == nested
    theirs = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    assert (theirs.num_hidden_layers, theirs.rope_parameters["rope_theta"]) == (flat.num_layers, 1e4)


def test_other_wrappers_are_not_read_flat(copied):
    file = copied("qwen3_vl") / "config.json"
    file.write_text(json.dumps(flattened(json.loads(file.read_text()))))
    with pytest.raises(TargetError, match="model_type='qwen3_vl' is none of the types"):
        read_target(file.parent)


@pytest.mark.parametrize("model_type", SEEING)
def test_tokens_of_an_image_are_those_that_its_patches_give(seeing_target, model_type):
    images = TargetImages(seeing_target(model_type))
    for size in ((20, 12), (33, 47), (8, 90), (1, 1), (400, 30)):
        image = Image.new("RGB", size)
        grid = images.arrays([image])["image_grid_thw"][0]
        assert images.num_tokens(image) == int(grid.prod()) // 4


def test_tokens_of_an_image_are_those_that_gemmas_processor_gives(seeing_target):
    """Its patches of 4 x 4 pixels are pooled by four, into at most 70 tokens."""
    images = TargetImages(seeing_target(GEMMA))
    for size, num_tokens in (((24, 24), 64), ((33, 47), 63), ((8, 90), 56), ((400, 30), 60)):
        assert images.num_tokens(Image.new("RGB", size)) == num_tokens, size
        arrays = images.arrays([Image.new("RGB", size)])
        assert sorted(arrays) == ["image_position_ids", "pixel_values"]
        placed = (arrays["image_position_ids"] >= 0).all(dim=-1).sum()
        assert int(placed) == 4 * num_tokens


def test_tokens_around_an_image_must_be_named(copied):
    file = copied(GEMMA) / "config.json"
    assert read_target(file.parent).image_ends == (IMAGE_ID - 2, IMAGE_ID - 1)
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"boi_token_id": None}))
    with pytest.raises(TargetError, match="boi_token_id"):
        read_target(file.parent)
    file.write_text(json.dumps(config | {"image_token_id": None}))
    assert read_target(file.parent).image_ends is None


def test_image_that_the_processor_refuses_is_a_data_error(seeing_target):
    with pytest.raises(DataError, match="refused by the target's image processor: absolute aspect ratio"):
        TargetImages(seeing_target("qwen2_5_vl")).num_tokens(Image.new("RGB", (201, 1)))


def test_an_image_of_one_column_logs_nothing(seeing_target, caplog):
    """Transformers would log that it cannot tell the image's channels from its columns."""
    assert TargetImages(seeing_target(GEMMA)).num_tokens(Image.new("RGB", (1, 397))) == 70
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "the image processor in '.*' cannot be read"),
        ("{", "the image processor in '.*' cannot be read"),
        ('{"image_processor_type": "Nonsense"}', "the image processor in '.*' cannot be read"),
        (
            '{"image_processor_type": "CLIPImageProcessor"}',
            "CLIPImageProcessorPil, does not say how many tokens",
        ),
    ],
)
def test_processor_that_cannot_be_used_is_a_target_error_of_one_line(copied, content, problem):
    file = copied() / "preprocessor_config.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(TargetError, match=problem) as caught:
        TargetImages(file.parent).num_tokens(Image.new("RGB", (20, 20)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_mean", []),
        ("image_mean", [0.5, 0.5]),
        ("image_std", [0.5, 0, 0.5]),
        ("image_std", float("nan")),
        ("rescale_factor", "nan"),
        ("rescale_factor", 0),
    ],
)
def test_pixels_that_cannot_be_scaled_are_refused(copied, name, value):
    file = copied() / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(TargetError, match=f"has {name}=.*, expected a number, or one for each colour; take"):
        TargetImages(file.parent).num_tokens(Image.new("RGB", (20, 20)))


@pytest.mark.parametrize(
    ("model_type", "file", "name"),
    [
        ("qwen2_5_vl", "preprocessor_config.json", "patch_size"),
        ("qwen3_vl", "preprocessor_config.json", "merge_size"),
        ("qwen3_5", "preprocessor_config.json", "temporal_patch_size"),
        (GEMMA, "processor_config.json", "patch_size"),
        (GEMMA, "processor_config.json", "pooling_kernel_size"),
    ],
)
@pytest.mark.parametrize("size", [-1, 0, 7, 10**9, "4", None])
def test_patches_of_other_sizes_than_the_target_takes_are_refused(copied, model_type, file, name, size):
    file = copied(model_type) / file
    fields = json.loads(file.read_text())
    fields.get("image_processor", fields)[name] = size
    file.write_text(json.dumps(fields))
    with pytest.raises(TargetError, match=rf"has {name}={size!r}, expected \d, which is vision_config\."):
        TargetImages(file.parent).num_tokens(Image.new("RGB", (20, 20)))


def test_sizes_that_make_more_tokens_than_any_memory_holds_are_a_data_error(copied):
    file = copied() / "preprocessor_config.json"
    sizes = {"size": {"shortest_edge": 10**12, "longest_edge": 10**13}}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    with pytest.raises(DataError, match=r"\d{11} tokens by the sizes in preprocessor_config\.json"):
        TargetImages(file.parent).num_tokens(Image.new("RGB", (20, 20)))


def test_drafts_for_gemma_4_turn_all_channels(seeing_target):
    """The target's own full attention turns a quarter of the channels, which engines give no draft."""
    target = read_target(seeing_target(GEMMA))
    assert target.rope["rope_type"] == "proportional"
    assert draft_rope(target.rope) == {"rope_type": "default", "rope_theta": 1_000_000.0}
