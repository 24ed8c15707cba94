"""What a folder of safetensors holds, read from the files' headers: no torch, no tensor data.

A safetensors file is 8 bytes of little-endian header length, a JSON header (name -> dtype, shape, offsets) and
the data. Sharded weights come with ``model.safetensors.index.json``, which maps names to files.
Source: the format's own description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from spec_core.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies. ``dtype`` is safetensors' own name (F32, BF16, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder's model, sorted; TargetError where there are none or one is missing."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise TargetError(_no_weights(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TargetError(f"{index} has no weight_map")
    names = cast("dict[str, str]", weight_map).values()
    files = sorted({folder / name for name in names})
    for file in files:
        if not file.is_file():
            raise TargetError(
                f"{index} names {file.name}, which is missing; the target was not copied completely"
            )
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's model by name."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for name, entry in _parse(file, read_header(file)).items():
            tensors[name] = StoredTensor(file=file, dtype=entry["dtype"], shape=tuple(entry["shape"]))
    return tensors


def read_header(file: Path) -> bytes:
    """The JSON header as stored; TargetError where the file is not safetensors or is cut short."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise TargetError(f"{file} is not a safetensors file, or was cut short")
        return stream.read(length)


def sample_bytes(file: Path) -> Iterator[bytes]:
    """A few blocks spread evenly over the file: tells two files of equal headers apart without reading them."""
    last = max(0, file.stat().st_size - _SAMPLE_BYTES)
    with file.open("rb") as stream:
        for number in range(_SAMPLES):
            stream.seek(last * number // (_SAMPLES - 1))
            yield stream.read(_SAMPLE_BYTES)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file that exists; TargetError otherwise."""
    try:
        value: object = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise TargetError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TargetError(f"{file} holds no JSON object")
    return cast("dict[str, Any]", value)


def _parse(file: Path, header: bytes) -> Mapping[str, Any]:
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        sound = all(isinstance(entry["shape"], list) and entry["dtype"] for entry in entries.values())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise TargetError(f"{file} is not a safetensors file: its header does not parse") from error
    if not sound or _LENGTH_BYTES + len(header) + end != file.stat().st_size:
        raise TargetError(f"{file} does not end where its header says; the file was cut short")
    return entries


def _no_weights(folder: Path) -> str:
    others = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern)
    )
    found = f"; it has {others[0]}: save the target as safetensors first" if others else ""
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}"
