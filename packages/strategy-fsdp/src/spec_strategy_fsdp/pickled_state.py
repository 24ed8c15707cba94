"""Checkpoints of earlier versions, whose index is a pickle: read without running what it might say.

A pickle names classes to build. Only those that the index of a checkpoint of tensors needs are found; the
tensors themselves and the generators are read by torch with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from spec_core import foreign_errors
from spec_core.errors import ArtifactError
from spec_core.sharding import INDEX_FILE, check_names, copy_overlap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.distributed.checkpoint import Metadata

    from spec_core import StateFolder

PICKLED_INDEX_FILE = ".metadata"
"""The index that earlier versions wrote in place of ``index.json``; they wrote no digests."""

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    *(("torch", name) for name in ("Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}  # fmt: skip


def is_pickled(folder: StateFolder) -> bool:
    """Return whether an earlier version has written this state."""
    return folder.has(PICKLED_INDEX_FILE) and not folder.has(INDEX_FILE)


def load_pickled(state: Mapping[str, Tensor], folder: StateFolder, group: dist.ProcessGroup) -> None:
    """Read into the tensors of ``state`` what an earlier version saved, and this rank's generator if it has one."""
    saved = read_pickled(folder)
    check_names(state, saved)
    for name, value in saved.items():
        copy_overlap(state[name], tuple(value.shape), value, (0,) * value.ndim, name)
    file = folder.path.parent / f"generator-{dist.get_rank(group)}.pt"
    if file.is_file():
        with foreign_errors(ArtifactError, f"{file} is damaged"):
            torch.set_rng_state(torch.load(file, weights_only=True))


def read_pickled(folder: StateFolder, prefix: str = "") -> dict[str, Tensor]:
    """Return every full tensor whose name begins with ``prefix``, in one process without any group."""
    reader = _PickledReader(folder)
    with foreign_errors(ArtifactError, f"{folder.path} cannot be read"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")  # one process is enough here
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(prefix)
        }
        try:
            dcp.load(state, storage_reader=reader, no_dist=True)
        except dcp.api.CheckpointException as error:
            raise _root_cause(error) from None
    return state


class _PickledReader(FileSystemReader):
    """torch's own reader, but for the index."""

    def __init__(self, folder: StateFolder) -> None:
        """Raise ArtifactError where the index is damaged or names more than a checkpoint of tensors needs."""
        super().__init__(folder.path)
        file = folder.path / PICKLED_INDEX_FILE
        content = folder.read_bytes(PICKLED_INDEX_FILE)
        with foreign_errors(ArtifactError, f"{file} is damaged"):
            self._metadata: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
            self._metadata.state_dict_metadata.items()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint does")
        return super().find_class(module, name)


def _root_cause(error: BaseException) -> BaseException:
    """Return the first failure that torch.distributed.checkpoint has wrapped."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error
