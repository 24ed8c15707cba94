"""Rows with images: what is read, and the tokens that images take; ``test_bad_images.py`` has what is refused."""

import numpy as np
import pyarrow as pa
import pytest
import transformers
from PIL import Image
from pyarrow import parquet
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from spec_core.errors import DataError
from spec_trainer.data.store import open_dataset, saved_dataset

from ....seeing_targets import EXPERTS, GEMMA, GEMMA_TEMPLATE, IMAGE_ID, TEMPLATE
from .image_rows import asked, encoded, pixels, plain, shown, uri

PROCESSORS = {
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "qwen3_5": Qwen3VLProcessor,
    **dict.fromkeys(EXPERTS, Qwen3VLProcessor),
    GEMMA: lambda **parts: transformers.Gemma4Processor(feature_extractor=None, **parts),
}


@pytest.mark.parametrize("model_type", PROCESSORS)
def test_tokens_are_those_of_the_models_own_processor(
    load_seeing, seeing_target, media, monkeypatch, model_type
):
    """The processor class wants a video processor, and so torchvision; without one it treats images the same."""
    if model_type == GEMMA:  # before Transformers 5.23, this module needs torchvision
        pytest.importorskip("transformers.models.gemma4.processing_gemma4")
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    folder = seeing_target(model_type)
    processor = PROCESSORS[model_type](
        image_processor=AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        video_processor=None,
        chat_template=GEMMA_TEMPLATE if model_type == GEMMA else TEMPLATE,
    )
    row = asked("Compare ", shown("a.png"), " with ", shown("b.jpg"), shown(uri()), ".")
    (sample,) = load_seeing(row, model_type=model_type).train
    text = processor.apply_chat_template(row["messages"], tokenize=False)
    images = [Image.open(media / "a.png"), Image.open(media / "b.jpg"), pixels()]
    ids = np.array(processor(text=[text], images=images)["input_ids"][0])
    assert np.array_equal(sample.input_ids, ids)
    assert len(sample.images) == 3
    supervised = AutoTokenizer.from_pretrained(folder).decode(sample.input_ids[sample.loss_mask])
    assert supervised == "A cat.<|im_end|>"
    assert not sample.loss_mask[sample.input_ids == IMAGE_ID].any()


def shared(question, **fields):
    """A row in ShareGPT's form."""
    return {
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "A cat."}],
        **fields,
    }


FORMS = {
    "url": asked({"type": "image", "url": "a.png"}, "What?"),
    "path": asked({"type": "image", "path": "a.png"}, "What?"),
    "file://": lambda media: asked(shown(f"file://{media}/a.png"), "What?"),
    "absolute": lambda media: asked(shown(f"{media}/a.png"), "What?"),
    "image_url": asked({"type": "image_url", "image_url": {"url": uri()}}, "What?"),
    "image_url as text": asked({"type": "image_url", "image_url": uri()}, "What?"),
    "input_image": asked({"type": "input_image", "image_url": uri()}, "What?"),
    "other media type": asked(shown(uri(media="image/jpeg")), "What?"),
    "place and images": {**asked({"type": "image"}, "What?"), "images": ["a.png"]},
    "place and image": {**asked({"type": "image"}, "What?"), "image": "a.png"},
    "ShareGPT, mark": shared("<image>\nWhat?", image="a.png"),
    "ShareGPT, no mark": shared("What?", image_path="a.png"),
    "ShareGPT, list": shared("What?", images=["a.png"]),
    "messages, mark": {**plain("<image>What?"), "images": ["a.png"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_with_an_image_is_the_same_sample(load_seeing, media, form):
    row = FORMS[form]
    row = row(media) if callable(row) else row
    (expected,) = load_seeing(asked(shown("a.png"), "What?")).train
    (sample,) = load_seeing(row).train
    assert np.array_equal(sample.input_ids, expected.input_ids)
    assert np.array_equal(sample.loss_mask, expected.loss_mask)
    assert [image.digest for image in sample.images] == [image.digest for image in expected.images]


def test_images_in_parquet_are_read(load_seeing, tmp_path):
    row = {**plain("<image>What?"), "images": [{"bytes": encoded(), "path": None}]}
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([row]), file)
    (sample,) = load_seeing(path=str(file)).train
    (expected,) = load_seeing(asked(shown("a.png"), "What?")).train
    assert np.array_equal(sample.input_ids, expected.input_ids)
    assert sample.images[0].digest == expected.images[0].digest


def test_several_turns_are_supervised_after_images(load_seeing, seeing_target):
    turns = [
        asked(shown("a.png"), "What?"),
        asked("And", shown("b.jpg"), answer={"role": "assistant", "content": "A dog."}),
        plain("Sure?", {"role": "assistant", "content": "Yes."}),
    ]
    (sample,) = load_seeing({"messages": [message for turn in turns for message in turn["messages"]]}).train
    text = AutoTokenizer.from_pretrained(seeing_target("qwen2_5_vl")).decode(
        sample.input_ids[sample.loss_mask]
    )
    assert text == "A cat.<|im_end|>A dog.<|im_end|>Yes.<|im_end|>"


def test_samples_that_differ_in_an_image_alone_are_two(load_seeing):
    rows = [asked(shown(uri(encoded(pixels(seed=seed)))), "What?") for seed in range(3)]
    datasets = [load_seeing(row, other, eval_samples=1) for row, other in (rows[:2], rows[1:])]
    assert [len(dataset.samples) for dataset in datasets] == [2, 2]
    assert datasets[0].digest != datasets[1].digest
    first, second = datasets[0].samples
    assert np.array_equal(first.input_ids, second.input_ids)


def test_samples_are_never_cut_inside_an_image(load_seeing):
    (whole,) = load_seeing(asked(shown("a.png"), shown("b.jpg"), "What is it?")).train
    end = int(np.flatnonzero(whole.input_ids == IMAGE_ID)[-1]) + 1
    row, other = asked(shown("a.png"), shown("b.jpg"), "What is it?"), asked("2 + 2?")
    after = load_seeing(row, other, max_length=end)
    assert [len(sample) for sample in after.train] == [end, len(after.train[1])]
    before = load_seeing(row, other, max_length=end - 1)
    assert [sample.images for sample in before.train] == [()]
    assert before.report.dropped["data.max_length cuts an image"].count == 1
    assert f"{end} tokens" in before.report.dropped["data.max_length cuts an image"].first


def test_images_survive_the_datasets_folder(load_seeing, tmp_path):
    dataset = load_seeing(asked("2 + 2?"), asked(shown("a.png"), shown(uri()), "What?"))
    with saved_dataset(dataset, tmp_path) as folder:
        opened = open_dataset(folder)
    assert [sample.images for sample in opened.samples] == [sample.images for sample in dataset.samples]
    assert opened.digest == dataset.digest


def test_images_in_rows_are_held_up_to_a_bound(load_seeing, monkeypatch):
    monkeypatch.setattr("spec_trainer.data.dataset._MOST_HELD_BYTES", 3 * len(encoded()))
    rows = [asked(shown(uri()), "What?") for _ in range(4)]
    assert len(load_seeing(*rows[:3]).train) == 3
    with pytest.raises(
        DataError, match=r":4: with this row, .* save the images as files below data.media_root"
    ):
        load_seeing(*rows)


def test_transparent_images_lie_on_white_and_turned_ones_upright(tmp_path):
    from spec_kit.targets import decoded_image

    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert decoded_image(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    turned, exif = pixels(20, 12), Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    assert decoded_image(encoded(turned, "JPEG", exif=exif)).size == (12, 20)


GOOD_BYTES = {
    **{mode: encoded(pixels(mode=mode)) for mode in ("RGB", "RGBA", "L", "LA")},
    **{f"JPEG {mode}": encoded(pixels(mode=mode), "JPEG") for mode in ("RGB", "L", "CMYK")},
    **{f"{kind}": encoded(pixels(), kind) for kind in ("WEBP", "GIF", "BMP")},
    "palette": encoded(pixels().quantize(16)),
    "bitmap": encoded(pixels(mode="L").convert("1")),
    "16 bit": encoded(Image.new("I;16", (9, 9))),
    "1x1": encoded(pixels(1, 1)),
    "200x1": encoded(pixels(200, 1)),
}


@pytest.mark.parametrize("name", GOOD_BYTES)
def test_images_of_every_usual_kind_are_taken(load_seeing, name):
    (sample,) = load_seeing(asked(shown(uri(GOOD_BYTES[name])), "What?")).train
    assert IMAGE_ID in sample.input_ids
    assert len(sample.images) == 1


@pytest.mark.xdist_group("processes that render rows")
def test_other_processes_read_images_alike(load_seeing, request):
    rows = [asked(shown("a.png" if number % 2 else uri()), f"What is {number}?") for number in range(40)]
    alone = load_seeing(*rows)
    request.getfixturevalue("by_processes")
    together = load_seeing(*rows)
    assert together.digest == alone.digest
    assert [sample.images for sample in together.train] == [sample.images for sample in alone.train]
