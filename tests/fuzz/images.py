"""Multimodal targets: image processors with odd sizes, damaged images, and ids without the tokens of their images."""

import base64
import json
import random
from pathlib import Path
from typing import Any

from ..image_requests import picture, question
from ..seeing_targets import GEMMA, IMAGE_ID, save_seeing_target
from . import damage, material

KINDS = ("qwen2_5_vl", GEMMA)
_SIZES = [-1, 0, 1, 3, 2.5, 10**9, 10**30, 1e308, "4", None, [], [4, 4], True, {}]
_KEYS = [
    "patch_size", "patch_size", "merge_size", "temporal_patch_size", "size", "min_pixels", "max_pixels",
    "pooling_kernel_size", "max_soft_tokens", "image_mean", "rescale_factor", "image_processor_type", "do_resize",
    "crop_size", "auto_map", "resample",
]  # fmt: skip
_ADDRESSES = [
    "", "x.png", "../x.png", "/dev/zero", "file:///etc/passwd", "http://127.0.0.1:1/x.png", "data:image/png;base64,",
    "data:image/png;base64,AAAA", "data:text/plain,hello", "data:", "\x00", "x" * 100_000, None, 5, {"url": None}, [],
]  # fmt: skip


def build(root: Path) -> None:
    """Write a target of each of ``KINDS``, with ``KIND.jsonl`` (conversations) and ``KIND-ids.jsonl`` (ids)."""
    for kind in KINDS:
        target = save_seeing_target(root / kind, kind)
        pictures = [picture((40, 24), seed) for seed in range(3)]
        chats = [
            {"messages": [question("what?", [shown]), {"role": "assistant", "content": "this"}]}
            for shown in pictures
        ]
        _write(root / f"{kind}.jsonl", chats)
        num_tokens = _num_tokens(target, pictures[0][1])
        urls = ["data:image/png;base64," + base64.b64encode(source.data).decode() for source, _ in pictures]
        ids = [IMAGE_ID - 2, *[IMAGE_ID] * num_tokens, IMAGE_ID - 1, *range(65, 75)]
        mask = [0] * (len(ids) - 9) + [1] * 9
        _write(
            root / f"{kind}-ids.jsonl",
            [{"input_ids": ids, "loss_mask": mask, "images": [url]} for url in urls],
        )


def image(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """Draw a damage of the image processor's sizes, of an image, or of the ids that stand for it."""
    kind = draw.choice(KINDS)
    target, form = root / kind, draw.choice(["", "-ids"])
    data = root / f"{kind}{form}.jsonl"
    how = draw.choice(["processor", "processor", "processor", "vision", "image", "image", "ids", "bytes"])
    if how in ("processor", "vision"):
        target = material.copy(root, kind, folder)
        what = _odd_size(target, draw) if how == "processor" else _odd_field(target, draw)
    elif how == "bytes":
        target = material.copy(root, kind, folder)
        what = damage.choose(
            draw.choice([*target.glob("*processor_config.json")]), draw, damage.damage_json_file
        )
    else:
        data = material.copy(root, data.name if how == "image" else f"{kind}-ids.jsonl", folder)
        what = _odd_image(data, draw) if how == "image" else _odd_ids(data, draw)
    more = ["data.on_bad_row=skip"] if draw.random() < 0.2 else []
    words = ["plan", "--target", target, "--data", data, "--output", folder / "out", *more]
    return f"{kind}: {what}", words


def _odd_size(target: Path, draw: random.Random) -> str:
    (file,) = target.glob("*processor_config.json")
    fields = json.loads(file.read_text())
    sizes, key, value = fields.get("image_processor", fields), draw.choice(_KEYS), draw.choice(_SIZES)
    sizes[key] = {draw.choice(["shortest_edge", "longest_edge"]): value} if key == "size" else value
    file.write_text(json.dumps(fields))
    return f"{key}={str(sizes[key])[:40]}"


def _odd_field(target: Path, draw: random.Random) -> str:
    """A field of config.json about images is an odd one."""
    file = target / "config.json"
    fields = json.loads(file.read_text())
    tokens = [key for key in fields if "token" in key]
    place, key = draw.choice(
        [(fields["vision_config"], key) for key in fields["vision_config"]] + [(fields, tokens[0])]
    )
    place[key] = draw.choice([*_SIZES, *damage.ODD_VALUES])
    file.write_text(json.dumps(fields))
    return f"config.json: {key}={str(place[key])[:40]}"


def _odd_image(data: Path, draw: random.Random) -> str:
    """An image is cut, flipped or of another form, or there is none, or one too many."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    uri = (
        rows[1]["images"][0]
        if "images" in rows[1]
        else rows[1]["messages"][0]["content"][0]["image_url"]["url"]
    )
    head, _, content = uri.partition(",")
    png = bytearray(base64.b64decode(content))
    png[draw.randrange(len(png))] ^= 1 << draw.randrange(8)
    cut = bytes(png[: draw.randrange(len(png))])
    wide = picture(draw.choice([(1, 1), (1, 400), (3_000, 1)]))[0].data
    value: Any = draw.choice(
        [*_ADDRESSES, *(f"{head},{base64.b64encode(one).decode()}" for one in (png, cut, wide))]
    )
    if "images" in rows[1]:
        rows[1]["images"] = draw.choice([[value], value, [value, uri], [uri] * 3, []])
    else:
        part = draw.choice(
            [{"type": "image_url", "image_url": {"url": value}}, {"type": "image", "image": value}]
        )
        rows[1]["messages"][0]["content"][0] = draw.choice([part, part, [part], {**part, "path": "x"}])
    _write(data, rows)
    return f"image {str(value)[:40]}"


def _odd_ids(data: Path, draw: random.Random) -> str:
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    ids = rows[1]["input_ids"]
    how = draw.choice(["none", "fewer", "more", "apart", "supervised", "no ends", "other ends"])
    last = len(ids) - 1 - ids[::-1].index(IMAGE_ID)
    if how == "none":
        ids[:] = [65] * len(ids)
    elif how in ("fewer", "apart"):
        ids[draw.randrange(1, last + 1)] = 65
    elif how == "more":
        ids[last + 1] = IMAGE_ID
    elif how == "supervised":
        rows[1]["loss_mask"] = [1] * len(ids)
    elif how == "no ends":
        ids[0] = ids[last + 1] = 65
    else:
        ids[0], ids[last + 1] = ids[last + 1], ids[0]
    _write(data, rows)
    return f"ids {how}"


def _num_tokens(target: Path, shown: Any) -> int:
    from spec_kit.targets import TargetImages

    return TargetImages(target).num_tokens(shown)


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
