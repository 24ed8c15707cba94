"""Storage of torch.distributed.checkpoint without pickle: tensors in safetensors files, what they are in JSON.

``state/rank-R.safetensors`` holds the parts that rank R wrote, under "name@offset"; ``state/index.json`` says of each
tensor its dtype, its full shape, and which part of it is where. The planner of torch.distributed.checkpoint puts them
together again, on any number of ranks.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spec_core.errors import ArtifactError, RunError
from spec_core.foreign import foreign_errors, read_json_object
from spec_trainer.checkpoint.folder import INDEX_FILE, new_digest, write_synced

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' names of what a checkpoint may hold."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}
_FILE_NAME = re.compile(r"state/rank-\d+\.safetensors")


class SafetensorsWriter(StorageWriter):
    """Writes one file per rank; on the coordinator ``digests`` then has those of all files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = f"state/rank-{rank}.safetensors"
        self.digests: dict[str, str] = {}

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data.properties.dtype not in _CODES:
                raise RunError(
                    f"{item.index.fqn} is no tensor of a dtype that a checkpoint holds: {', '.join(_DTYPES)}"
                )
        digest = _write_tensors(self._folder / self._file, plan.items, planner) if plan.items else ""
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [WriteResult(item.index, _num_bytes(item), (self._file, digest)) for item in plan.items]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for of_rank in results for result in of_rank]
        places = {result.index: result.storage_data[0] for result in written}
        index = {
            name: {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "parts": [
                    {
                        "offset": list(chunk.offsets),
                        "shape": list(chunk.sizes),
                        "file": places[MetadataIndex(name, chunk.offsets)],
                    }
                    for chunk in entry.chunks
                ],
            }
            for name, entry in metadata.state_dict_metadata.items()
        }
        self.digests = dict(result.storage_data for result in written)
        self.digests[INDEX_FILE] = write_synced(self._folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # it is made by hand, never found by a path


class SafetensorsReader(StorageReader):
    """Reads what a ``SafetensorsWriter`` wrote."""

    def __init__(self, folder: Path) -> None:
        """Raise ArtifactError where the index does not make sense."""
        self._folder = folder
        self._files: dict[MetadataIndex, str] = {}
        index = read_json_object(folder / INDEX_FILE, ArtifactError)
        with foreign_errors(ArtifactError, f"{folder / INDEX_FILE} is damaged"):
            self._metadata = Metadata({name: self._entry(name, entry) for name, entry in index.items()})

    def _entry(self, name: str, entry: dict[str, Any]) -> TensorStorageMetadata:
        chunks = []
        for part in entry["parts"]:
            if not _FILE_NAME.fullmatch(part["file"]):
                raise ValueError(f"file {part['file']!r}, expected state/rank-N.safetensors")
            chunks.append(ChunkStorageMetadata(torch.Size(part["offset"]), torch.Size(part["shape"])))
            self._files[MetadataIndex(name, part["offset"])] = part["file"]
        return TensorStorageMetadata(
            TensorProperties(_DTYPES[entry["dtype"]]), torch.Size(entry["shape"]), chunks
        )

    def reset(self, checkpoint_id: object = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for file, items in by_file.items():
            with safe_open(self._folder / file, framework="pt") as tensors:
                for item in items:
                    _read(tensors.get_tensor(_key(item.storage_index)), item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False


def _read(part: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copy what the item asks for out of a part that was saved."""
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dimension, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def _write_tensors(file: Path, items: list[WriteItem], planner: SavePlanner) -> str:
    """Write a safetensors file, one tensor in memory at a time; return its digest."""
    items = sorted(
        items, key=lambda item: -item.tensor_data.properties.dtype.itemsize
    )  # so that each is aligned
    header = _header(items)
    digest = new_digest(header)
    with file.open("wb") as stream, ThreadPoolExecutor(1) as pool:
        stream.write(header)
        for item in items:
            tensor = planner.resolve_data(item).detach().cpu().contiguous()
            content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            digested = pool.submit(digest.update, content)  # while it is written
            stream.write(content)
            digested.result()
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _header(items: list[WriteItem]) -> bytes:
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for item in items:
        start, end = end, end + _num_bytes(item)
        entries[_key(item.index)] = {
            "dtype": _CODES[item.tensor_data.properties.dtype],
            "shape": list(item.tensor_data.chunk.sizes),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _num_bytes(item: WriteItem) -> int:
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"
