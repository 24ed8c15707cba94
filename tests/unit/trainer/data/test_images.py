"""Rows with images: what is read, the tokens that images take, and images that cannot be used."""

import base64
import os
import resource
import struct
import zlib
from io import BytesIO

import numpy as np
import pyarrow as pa
import pytest
import transformers
from PIL import Image
from pyarrow import parquet
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from transformers.processing_utils import ProcessorMixin

from spec_core.errors import DataError
from spec_kit.targets import read_target
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.row_images import ImageRules
from spec_trainer.data.store import open_dataset, saved_dataset

from ....seeing_targets import EXPERTS, GEMMA, GEMMA_TEMPLATE, IMAGE, IMAGE_ID, TEMPLATE, VOCABULARY

PROCESSORS = {
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "qwen3_5": Qwen3VLProcessor,
    **dict.fromkeys(EXPERTS, Qwen3VLProcessor),
    GEMMA: lambda **parts: transformers.Gemma4Processor(feature_extractor=None, **parts),
}
ANSWER = {"role": "assistant", "content": "A cat."}


def pixels(width=20, height=12, mode="RGB", seed=0):
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng((width, height, seed)).integers(
        0, 256, (height, width, channels), dtype=np.uint8
    )
    return Image.frombytes(mode, (width, height), values.tobytes())


def encoded(image=None, kind="PNG", **options) -> bytes:
    file = BytesIO()
    (image or pixels()).save(file, kind, **options)
    return file.getvalue()


def uri(data=None, media="image/png"):
    return f"data:{media};base64,{base64.b64encode(data or encoded()).decode()}"


def asked(*parts, answer=ANSWER):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return plain(content, answer)


def plain(question, answer=ANSWER):
    return {"messages": [{"role": "user", "content": question}, answer]}


def shown(reference):
    return {"type": "image", "image": reference}


@pytest.fixture
def media(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a.png").write_bytes(encoded())
    (folder / "b.jpg").write_bytes(encoded(pixels(33, 47), "JPEG"))
    return folder


@pytest.fixture
def load_seeing(seeing_target, write, media):
    """Rows to a dataset of a target that sees."""

    def load(*rows, model_type="qwen2_5_vl", refused="", **settings):
        path = settings.pop("path", None) or write(*rows)
        config = DataConfig(path=path, **({"eval_samples": 0, "media_root": str(media)} | settings))
        rules = ImageRules.of(read_target(seeing_target(model_type)), refused)
        return load_dataset(config, seeing_target(model_type), VOCABULARY, images=rules)

    return load


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


def header_of(width, height) -> bytes:
    """A PNG that says it is so large, and holds nothing."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def cut(kind, share):
    data = encoded(pixels(64, 64), kind)
    return data[: int(len(data) * share)]


def animated(kind):
    return encoded(pixels(), kind, save_all=True, append_images=[pixels(seed=1)])


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'
TEXTS = (
    b"", b"\0", b"no image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"BM", SVG,
    b"%PDF-1.7\n", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"P6\n2 2\n255\n" + bytes(12), b"\x93NUMPY", b"PK\3\4", b"{}",
    b"II*\0" + bytes(20), b"MM\0*" + bytes(20), bytes(range(256)), b"\0\0\1\0", b"8BPS\0\1", b"qoif",
)  # fmt: skip
HEADERS = (
    (30_000, 30_000), (1 << 31, 1), (65_535, 65_535), (2**31 - 1, 2**31 - 1), (0, 0), (0, 5), (5, 0), (9_460, 9_460),
    (13_378, 13_378), (100, 100), (1, 89_478_486), (300_000, 300), (10_000, 9_000),
)  # fmt: skip
BAD_BYTES: dict[str, bytes] = {
    **{f"bytes {number}: {text[:12]!r}": text for number, text in enumerate(TEXTS)},
    **{
        f"{kind} cut to {share:.0%}": cut(kind, share)
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
        for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)
    },
    **{f"animated {kind}": animated(kind) for kind in ("GIF", "PNG", "WEBP")},
    **{f"header of {width}x{height}": header_of(width, height) for width, height in HEADERS},
    **{
        f"{w}x{h} pixels": encoded(pixels(w, h))
        for w, h in ((300, 1), (1, 300), (1000, 2), (2, 1000), (201, 1))
    },
    **{
        kind: encoded(pixels(), kind)
        for kind in ("TIFF", "PPM", "TGA", "ICO", "PCX", "SGI", "DDS", "EPS", "PDF")
    },
}
OUTSIDE = r"""
    ../secret.png ../media/../secret.png sub/../../secret.png ./../secret.png /etc/passwd ../media2/a.png
    .. / file:///etc/passwd file://../secret.png file:///%2e%2e/etc/passwd file://%2e%2e/secret.png
    sub/../../../etc/passwd ~/a.png //etc/passwd ....//secret.png ..\secret.png /etc/../etc/passwd
    media/../../secret.png file:/etc/passwd file:a.png
"""
NETWORK = """
    http://127.0.0.1/a.png https://example.com/a.png HTTPS://example.com/a.png ftp://h/a.png
    s3://bucket/a.png gs://bucket/a.png hf://datasets/a.png Http:a.png https:a.png
"""
DATA_URIS = (
    "data:", "data:,", "data:image/png", "data:image/png,", "data:image/png;base64", "data:;base64,",
    "data:image/png;base64,", "data:image/png;base64,!!!!", "data:image/png;base64,iVBOR", "data:base64,",
    uri(media="text/plain"), uri(media="application/octet-stream"), uri(media="video/mp4"), uri(media=""),
    uri(media="imagepng"), uri(media="text/html;image/png"), uri()[:-5], uri()[:200], uri() + "=", uri()[:40],
    uri().replace(";base64", ""), uri().replace(";base64", ";base32"), uri().replace(",", ";"), uri(SVG),
    uri().replace("+", " ", 1).replace("A", "*", 1), uri(b"no image"), uri(header_of(30_000, 30_000)),
    uri(SVG, "image/svg+xml"), uri() + uri(), "data:image/png;base64," + "A" * 4_000, "DATA:text/plain,x",
)  # fmt: skip
OTHER_TYPES = (None, 0, 1.5, True, [], ["a.png"], {}, {"url": None}, {"file": "a.png"}, {"url": 3}, [[]])
BAD_REFERENCES: dict[str, object] = {
    "missing": "missing.png",
    "missing folder": "none/a.png",
    "directory": ".",
    "directory below": "sub",
    "FIFO": "fifo",
    "device": "/dev/zero",
    "device by a link": "to_device",
    "proc": "/proc/self/mem",
    "empty": "",
    "null character": "a\0.png",
    "line break": "a\nb.png",
    "escape": "\x1b[31m.png",
    "long": "a" * 5_000,
    "long folders": "a/" * 3_000,
    "file below a file": "a.png/b.png",
    "huge": "huge.png",
    "link outside": "outside.png",
    "folder linked outside": "linked/secret.png",
    "dangling link": "dangling.png",
    "circle of links": "circle.png",
    "not readable as UTF-8": "\udcff.png",
    **{f"outside by {path}": path for path in OUTSIDE.split()},
    **{f"network by {address[:20]}": address for address in NETWORK.split()},
    **{f"data URI {number}": text for number, text in enumerate(DATA_URIS)},
    **{f"reference {value!r:.30}": value for value in OTHER_TYPES},
}
BAD_ROWS: dict[str, object] = {
    "thousands of images": asked(*[shown("a.png")] * 10_000, "What?"),
    "too many images": asked(*[shown("a.png")] * 65, "What?"),
    "too many in the row": {**asked("What?"), "images": ["a.png"] * 3_000},
    "two fields": {**asked("What?"), "images": ["a.png"], "image": "a.png"},
    "two sources": asked({"type": "image", "image": "a.png", "url": "b.jpg"}, "What?"),
    "place without image": asked({"type": "image"}, "What?"),
    "null source": asked({"type": "image", "image": None}, "What?"),
    "more places": {**asked({"type": "image"}, {"type": "image"}, "What?"), "images": ["a.png"]},
    "more images": {**asked({"type": "image"}, "What?"), "images": ["a.png", "b.jpg"]},
    "more marks": {**asked("<image><image>What?"), "images": ["a.png"]},
    "fewer marks": {**asked("<image>What?"), "images": ["a.png", "b.jpg"]},
    "parts and the row's": {**asked(shown("a.png"), "What?"), "images": [5]},
    "in an answer": asked("What?", answer={"role": "assistant", "content": [shown("a.png")]}),
    "in a system prompt": {
        "messages": [
            {"role": "system", "content": [shown("a.png")]},
            {"role": "user", "content": "x"},
            ANSWER,
        ]
    },
    "in a tool's message": {
        "messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": [shown("a.png")]}, ANSWER]
    },
    "no user": {"messages": [ANSWER], "images": ["a.png"]},
    "token in a text": asked(shown("a.png"), IMAGE),
    "token without image": asked(IMAGE, "What?"),
    "token in plain text": {"text": f"So {IMAGE}"},
    "token among ids": {"input_ids": [5, IMAGE_ID, 6], "loss_mask": [0, 0, 1]},
    "video": asked({"type": "video", "video": "a.mp4"}, "What?"),
    "video_url": asked({"type": "video_url", "video_url": {"url": "a.mp4"}}, "What?"),
    "audio": asked({"type": "audio", "audio": "a.wav"}, "What?"),
    "input_audio": asked({"type": "input_audio", "input_audio": {}}, "What?"),
    "row's video": {**asked("What?"), "video": "a.mp4"},
    "row's audios": {**asked("What?"), "audios": ["a.wav"]},
    "file part": asked({"type": "file", "file": {}}, "What?"),
    **{
        f"images={value!r}": {**asked("What?"), "images": value}
        for value in ([None], [3], {"url": 3}, [{}], [""], 5)
    },
    **{
        f"type {kind!r}": asked({"type": kind, "image": "a.png"}, "x")
        for kind in (None, 3, "Image", "img", ["image"])
    },
}
CASES = {
    **{f"file of {name}": ("file", data) for name, data in BAD_BYTES.items()},
    **{f"URI of {name}": ("uri", data) for name, data in BAD_BYTES.items()},
    **{name: ("reference", value) for name, value in BAD_REFERENCES.items()},
    **{name: ("row", value) for name, value in BAD_ROWS.items()},
}


@pytest.fixture
def traps(media, tmp_path):
    """Put pipes, links and folders in and around the folder of the images; return that folder."""
    (media / "sub").mkdir()
    os.mkfifo(media / "fifo")
    (tmp_path / "secret.png").write_bytes(encoded())
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "a.png").write_bytes(encoded())
    (media / "outside.png").symlink_to(tmp_path / "secret.png")
    (media / "linked").symlink_to(tmp_path)
    (media / "dangling.png").symlink_to(media / "nowhere.png")
    (media / "circle.png").symlink_to(media / "circle.png")
    (media / "to_device").symlink_to("/dev/zero")
    with (media / "huge.png").open("wb") as huge:
        huge.truncate((64 << 20) + 1)
    return media


def test_there_are_enough_malformed_cases():
    assert len(CASES) >= 200


def row_of(case, folder):
    """The row of a case; its file, if it has one, is in ``folder``."""
    kind, value = CASES[case]
    if kind == "file":
        name = f"bad-{list(CASES).index(case)}"
        (folder / name).write_bytes(value)
        value = name
    elif kind == "uri":
        value = uri(value or b" ")
    return value if kind == "row" else asked(shown(value), "What?")


@pytest.mark.parametrize("case", CASES)
def test_row_with_a_bad_image_ends_in_one_line_that_names_it(load_seeing, traps, case):
    row = row_of(case, traps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as caught:
        load_seeing(asked("2 + 2?"), row)
    text = str(caught.value)
    assert "rows.jsonl:2: " in text
    assert "data.on_bad_row=skip" in text
    assert "\n" not in text
    assert len(text) < 2_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


def test_rows_with_bad_images_can_be_skipped(load_seeing, traps):
    rows = [row_of(case, traps) for case in CASES]
    dataset = load_seeing(asked("2 + 2?"), *rows, on_bad_row="skip")
    assert len(dataset.train) == 1
    assert sum(rows.count for rows in dataset.report.dropped.values()) == len(CASES)


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


def test_paths_need_the_folder_of_the_images(load_seeing):
    with pytest.raises(DataError, match=r":1: bad image: image 1, 'a.png': set data.media_root"):
        load_seeing(asked(shown("a.png"), "What?"), media_root=None)
    assert len(load_seeing(asked(shown(uri()), "What?"), media_root=None).train) == 1


def test_images_are_refused_with_the_reason(load_seeing):
    row = asked(shown("a.png"), "What?")
    with pytest.raises(DataError, match=r":1: not text alone: .*'image'; engine 'x' is blind; remove"):
        load_seeing(row, refused="engine 'x' is blind")
    with pytest.raises(DataError, match=r"the row has 'images'; engine 'x' is blind"):
        load_seeing({**asked("What?"), "images": ["a.png"]}, refused="engine 'x' is blind")


def test_template_without_places_for_images_is_refused(load_seeing):
    template = "{% for m in messages %}{{ m.role }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    with pytest.raises(DataError, match="the chat template must write it once for each image"):
        load_seeing(asked(shown("a.png"), "What?"), chat_template=template)


@pytest.mark.xdist_group("processes that render rows")
def test_other_processes_read_images_alike(load_seeing, request):
    rows = [asked(shown("a.png" if number % 2 else uri()), f"What is {number}?") for number in range(40)]
    alone = load_seeing(*rows)
    request.getfixturevalue("by_processes")
    together = load_seeing(*rows)
    assert together.digest == alone.digest
    assert [sample.images for sample in together.train] == [sample.images for sample in alone.train]
