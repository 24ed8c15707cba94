"""Checkpoints of earlier versions, whose index is a pickle: read without running what it might say.

A pickle names classes to build. Only those that the index of a checkpoint of tensors needs are found; the
tensors themselves and the generators are read by torch with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from spec_core.errors import ArtifactError
from spec_core.foreign import foreign_errors, read_bytes
from spec_trainer.checkpoint.folder import PICKLED_INDEX_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint import Metadata

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


class PickledReader(FileSystemReader):
    """torch's own reader, but for the index."""

    def __init__(self, folder: Path) -> None:
        """Raise ArtifactError where the index is damaged or names more than a checkpoint of tensors needs."""
        file = folder / PICKLED_INDEX_FILE
        super().__init__(file.parent)
        self._folder = folder
        content = read_bytes(file, ArtifactError)
        with foreign_errors(ArtifactError, f"{file} is damaged"):
            self._metadata: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
            self._metadata.state_dict_metadata.items()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def generator(self, rank: int) -> torch.Tensor | None:
        """Return the state of a rank's generator, if there was such a rank."""
        file = self._folder / f"generator-{rank}.pt"
        if not file.is_file():
            return None
        with foreign_errors(ArtifactError, f"{file} is damaged"):
            return torch.load(file, weights_only=True)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint does")
        return super().find_class(module, name)
