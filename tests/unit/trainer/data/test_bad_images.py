"""Images that cannot be used: each row ends in one line that names it, or is skipped."""

import os
import resource
import struct
import zlib

import pytest

from spec_core.errors import DataError

from ....seeing_targets import IMAGE, IMAGE_ID
from .image_rows import ANSWER, asked, encoded, pixels, shown, uri


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
        for share in (0.1, 0.7)
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


def row_of(case, folder):
    """The row of a case; its file, if it has one, is in ``folder``."""
    kind, value = CASES[case]
    if kind == "file":
        name = f"bad-{list(CASES).index(case)}"
        (folder / name).write_bytes(value)
        value = name
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
