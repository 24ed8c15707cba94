"""Read names, shapes and dtypes of tensors from the headers of safetensors files, without torch.

safetensors itself reads and checks each header. Sharded weights come with ``model.safetensors.index.json``, which
maps names to files. Source of the format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from spec_core import foreign_errors, read_json_object
from spec_core.errors import TargetError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_BLOCK_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 4, 512


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """File, dtype and shape of a stored tensor; ``dtype`` is safetensors' name (F32, BF16, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder's model, sorted. Raise TargetError if one is missing."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not index.is_file():
        if not single.is_file():
            raise TargetError(_no_weights(folder))
        _check_alone(single)
        return [single]
    files = sorted({folder / name for name in _file_names(index)})
    if single.is_file() and files != [single]:
        # transformers would read the single file, vLLM and SGLang the files of the index.
        raise TargetError(
            f"{folder} holds two models, {SINGLE_FILE} and the files that {INDEX_FILE} names, and engines differ in "
            "which they load; delete the one that is not the target"
        )
    for file in files:
        if not file.is_file():
            raise TargetError(
                f"{index} names {file.name}, which is missing; the target was not copied completely"
            )
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's model by name."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors |= _tensors_of(file)
    return tensors


def read_header(file: Path) -> bytes:
    """Return the bytes of the JSON header of a safetensors file that ``stored_tensors`` has read."""
    with file.open("rb") as stream:
        return stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "little"))


def are_equal(folder: Path, one: str, other: str) -> bool:
    """Return whether two stored tensors of a folder's model have the same dtype, shape and bytes."""
    tensors = stored_tensors(folder)
    first, second = tensors[one], tensors[other]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pairs = zip(_blocks(first.file, one), _blocks(second.file, other), strict=True)
    return all(block == other_block for block, other_block in pairs)


def sampled_blocks(file: Path) -> Iterator[bytes]:
    """Yield four blocks of at most 512 bytes of each tensor, spread evenly over it.

    They show whether a whole tensor of two files with equal headers differs, without reading the whole files.
    """
    with file.open("rb", buffering=0) as stream:
        for start, stop in _places(file).values():
            last = max(start, stop - _SAMPLE_BYTES)
            for number in range(_SAMPLES):
                stream.seek(start + (last - start) * number // (_SAMPLES - 1))
                yield stream.read(min(_SAMPLE_BYTES, stop - start))


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    from safetensors import safe_open

    with (
        foreign_errors(TargetError, f"{file} is not a safetensors file, or was cut short"),
        safe_open(file, framework="np") as stored,
    ):
        parts = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118  the reader is no mapping
        return {
            name: StoredTensor(file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
            for name, part in parts.items()
        }


def _check_alone(single: Path) -> None:
    """Raise TargetError if a file beside it has tensors of the same names. Without an index, vLLM reads all files."""
    for other in sorted(set(single.parent.glob("*.safetensors")) - {single}):
        if shared := sorted(_tensors_of(single).keys() & _tensors_of(other).keys()):
            raise TargetError(
                f"{single.parent} holds two models, {single.name} and {other.name}, both with {shared[0]}, and "
                "engines differ in which they load; delete the one that is not the target"
            )


def _blocks(file: Path, name: str) -> Iterator[bytes]:
    """Yield the bytes of a stored tensor in blocks of at most 1 MiB."""
    start, stop = _places(file)[name]
    with file.open("rb") as stream:
        stream.seek(start)
        for done in range(start, stop, _BLOCK_BYTES):
            yield stream.read(min(_BLOCK_BYTES, stop - done))


def _places(file: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte of each tensor in the file, and the byte after its last."""
    header = read_header(file)
    base = _LENGTH_BYTES + len(header)
    offsets = {name: fields.get("data_offsets") for name, fields in json.loads(header).items()}
    return {name: (base + found[0], base + found[1]) for name, found in offsets.items() if found}


def _file_names(index: Path) -> set[str]:
    weight_map: object = read_json_object(index, TargetError).get("weight_map")
    names = cast("dict[str, object]", weight_map).values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) and "/" not in name and name != ".." for name in names):
        raise TargetError(f"{index} has no weight_map from tensors to names of files beside it")
    return {str(name) for name in names}


def _no_weights(folder: Path) -> str:
    others = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern)
    )
    found = f"; it has {others[0]}: save the target as safetensors first" if others else ""
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}"
