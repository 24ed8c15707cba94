"""Ways to damage a file, drawn from a seeded generator."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3.5, -0.0, 1e308, 2**31, 2**63, 10**400, "", "x", "0", "true", "\x1b[31mred",
    "\ud800", "日本", "x" * 100_000, "../..", "/etc/passwd", "${oc.env:HOME}", "{{ 1/0 }}",
    "<img src=x onerror=alert(1)>", [], {}, [[]], [None],
    [1, 2, 3], ["x"], {"x": 1}, {"": {}}, [True], [2.5], ["x"] * 1_000,
]  # fmt: skip
_ODD_TEXTS = [
    "", "null", "[]", "{}", "0", '"x"', "[" * 100_000, '{"a":' * 100_000, "9" * 5_000, "\ufeff", "\x00" * 9,
]  # fmt: skip


def damage_bytes(file: Path, draw: random.Random) -> str:
    """Flips, cuts, repeats, removes or inserts somewhere in the file."""
    content = bytearray(file.read_bytes())
    start = draw.randrange(len(content) or 1)
    stop = min(len(content), start + draw.choice([1, 4, 64, 1024]))
    how = draw.choice(["flip", "cut", "repeat", "remove", "insert", "zero"])
    if how == "flip" and content:
        content[start] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[start:]
    elif how == "repeat":
        content[start:start] = content[start:stop] * draw.choice([1, 3])
    elif how == "remove":
        del content[start:stop]
    elif how == "insert":
        content[start:start] = draw.randbytes(draw.choice([1, 8, 200]))
    else:
        content[start:stop] = bytes(stop - start)
    file.write_bytes(content)
    return f"{how} at {start}"


def replace_file(file: Path, draw: random.Random) -> str:
    """Something else under the file's name."""
    file.unlink()
    how = draw.choice(["absent", "pipe", "device", "folder", "loop", "text", "random", "sparse"])
    if how == "pipe":
        os.mkfifo(file)
    elif how == "device":
        file.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/dev/urandom"]))
    elif how == "folder":
        file.mkdir()
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "text":
        file.write_text(draw.choice(_ODD_TEXTS))
    elif how == "random":
        file.write_bytes(draw.randbytes(draw.choice([1, 8, 4096])))
    elif how == "sparse":
        with file.open("wb") as stream:
            stream.truncate(3 << 30)
    return how


def damage_json(text: str, draw: random.Random) -> tuple[str, str]:
    """One value, somewhere in the document, becomes another, goes, or gets company."""
    document = json.loads(text)
    place, key = draw.choice(list(places(document)))
    how = draw.choice(["value", "value", "value", "remove", "add"])
    if how == "remove":
        del place[key]
    elif how == "add" and isinstance(place, dict):
        place[draw.choice(["x", "", "__metadata__", "auto_map"])] = draw.choice(ODD_VALUES)
    else:
        place[key] = draw.choice(ODD_VALUES)
    return json.dumps(document), f"{how} of {str(key)[:40]}"


def damage_json_file(file: Path, draw: random.Random) -> str:
    text, what = damage_json(file.read_text(), draw)
    file.write_text(text)
    return what


def damage_rows(file: Path, draw: random.Random) -> str:
    """One row of a .jsonl file."""
    lines = file.read_text().splitlines()
    number = draw.randrange(len(lines))
    lines[number], what = damage_json(lines[number], draw)
    file.write_text("\n".join(lines))
    return f"row {number}: {what}"


def damage_header(file: Path, draw: random.Random) -> str:
    """The JSON header of a safetensors file, its length kept right."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text, what = damage_json(content[8 : 8 + length].decode(), draw)
    file.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + content[8 + length :])
    return what


def forge_index(file: Path, draw: random.Random) -> str:
    """The index of features, with the checksum that goes with it."""
    from spec_trainer.offline.index import digest

    body = json.loads(file.read_text())
    del body["checksum"]
    text, what = damage_json(json.dumps(body), draw)
    body = json.loads(text)
    checksum = digest(json.dumps(body, sort_keys=True).encode())
    file.write_text(json.dumps({"checksum": checksum, **body}))
    return what


def choose(file: Path, draw: random.Random, *structured: Callable[[Path, random.Random], str]) -> str:
    """Mostly a damage that leaves the file's form whole; the others end at the first check."""
    how = draw.choice([*structured, *structured, damage_bytes, replace_file])
    return f"{file.name}: {how(file, draw)}"


def places(value: Any) -> Any:
    """(container, key) of every value below ``value``."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])
