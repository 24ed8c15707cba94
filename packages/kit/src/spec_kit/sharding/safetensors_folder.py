"""SafetensorsFolder is a StateFolder on disk, with safetensors and JSON files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from spec_core import StateFolder, foreign_errors
from spec_core.errors import ArtifactError, RunError
from spec_core.foreign import parse_json_object, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_core.state_folder import TensorFile

new_digest = functools.partial(hashlib.blake2b, digest_size=16)
"""Creates the hash object for the checksum of a checkpoint's file."""

DTYPE_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Torch's name of a dtype that a checkpoint may hold -> safetensors' name."""


class SafetensorsFolder(StateFolder):
    """The folder of one checkpoint's state, as used by one process."""

    def __init__(self, path: Path) -> None:
        """Use the folder ``path``, which must exist before a file is written."""
        self.path = path
        self.digests: dict[str, str] = {}
        """File name -> digest of each file that this process has written."""

    def write_tensors(
        self, name: str, tensors: Mapping[str, Tensor], check: Callable[[], None] | None = None
    ) -> None:
        """Write a safetensors file from tensors on any device; they are copied to the CPU one at a time.

        ``check`` is called before each tensor, and may raise an error to end the call.
        """
        for key, tensor in tensors.items():
            if _dtype_name(tensor) not in DTYPE_CODES:
                raise RunError(
                    f"{key} is no tensor of a dtype that a checkpoint holds: {', '.join(DTYPE_CODES)}"
                )
        # Largest items first, so that each tensor is aligned.
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        header = _header(ordered)
        digest = new_digest(header)
        with (self.path / name).open("wb") as stream, ThreadPoolExecutor(1) as pool:
            stream.write(header)
            for tensor in ordered.values():
                if check is not None:
                    check()
                content = _bytes_of(tensor)
                digested = pool.submit(digest.update, content)  # while it is written
                stream.write(content)
                digested.result()
            stream.flush()
            os.fsync(stream.fileno())
        self.digests[name] = digest.hexdigest()

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file."""
        self.digests[name] = write_synced(self.path / name, json.dumps(value, indent=1) + "\n")

    def has(self, name: str) -> bool:
        """Return whether the folder has a file ``name``."""
        return (self.path / name).is_file()

    def open_tensors(self, name: str) -> TensorFile:
        """Return an open safetensors file (``safetensors.safe_open``), to be used in a ``with`` statement."""
        from safetensors import safe_open

        self._check_there(name)
        with foreign_errors(ArtifactError, f"{self.path / name} cannot be read"):
            return safe_open(self.path / name, framework="pt")

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Return every tensor of a safetensors file."""
        with self.open_tensors(name) as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 (it is no mapping)

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file of at most 64 MiB."""
        self._check_there(name)
        return read_bytes(self.path / name, ArtifactError)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file."""
        return parse_json_object(self.read_bytes(name), self.path / name, ArtifactError)

    def _check_there(self, name: str) -> None:
        if not self.has(name):
            raise ArtifactError(
                f"{self.path / name} is missing; if another strategy wrote this checkpoint, set strategy.name to it"
            )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def write_synced(file: Path, text: str) -> str:
    """Write and fsync a file; return its digest."""
    content = text.encode()
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return new_digest(content).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors header, padded so that the data begins at a multiple of 8 bytes."""
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for key, tensor in tensors.items():
        start = end
        end = end + tensor.nbytes
        entries[key] = {
            "dtype": DTYPE_CODES[_dtype_name(tensor)], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
