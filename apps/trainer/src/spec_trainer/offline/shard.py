"""One shard: a safetensors file of some samples' features, written whole or not at all, read through mmap.

``hidden_states`` [T, N, H] and ``input_ids`` int64 [T] hold the shard's samples one after the other. The file's own
metadata says which samples, where, and their checksums, so that a shard stands for itself until the index is written.
Imports torch only to write.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pydantic
from safetensors import SafetensorError

from spec_core.errors import ArtifactError, RunError
from spec_core.foreign import check_regular, foreign_errors
from spec_trainer.disk import follow_umask, new_folder, not_written
from spec_trainer.offline.index import (
    Columns,
    Number,
    ShardEntry,
    StoredSample,
    columns,
    digest,
    rows,
    token_digest,
)

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core.records import DraftBatch, FeatureSchema
    from spec_trainer.offline.index import FeatureIdentity

SCRATCH = ".partial-"
"""How the name of the folder begins in which a shard is being written."""
_HIDDEN, _IDS, _METADATA = "hidden_states", "input_ids", "spec_trainer"
_LENGTH_BYTES = 8
_ID_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound


def remedy(file: Path) -> str:
    return f"delete {file} and run the capture again, which captures that shard only"


def write_shard(file: Path, batch: DraftBatch, identity: FeatureIdentity) -> None:
    """``batch``: the samples of the shard, touching. A reader never sees half of a file. Raises RunError where
    there is no room for it."""
    from safetensors.torch import save_file

    samples = [_stored(batch, span.sample_id, span.start, span.stop) for span in batch.spans]
    # One key: safetensors writes several in any order, and a shard captured again should be the same file.
    metadata = {_METADATA: json.dumps({"identity": identity.digest, "samples": columns(samples)})}
    scratch = scratch_of(file)
    try:
        save_file({_HIDDEN: batch.hidden_TNH, _IDS: batch.input_ids_T}, scratch, metadata)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())  # the name must not outlive a power cut that its bytes do not
        follow_umask(scratch)
        scratch.replace(file)
    except (OSError, SafetensorError) as error:
        raise not_written(file, file.parent, error) from error
    finally:
        shutil.rmtree(scratch.parent, ignore_errors=True)


def scratch_of(file: Path) -> Path:
    """In a new folder of its own: safetensors has further files beside the one that it writes."""
    return new_folder(file.parent, SCRATCH) / file.name


def _stored(batch: DraftBatch, sample_id: int, start: int, stop: int) -> StoredSample:
    import torch

    ids_T = batch.input_ids_T[start:stop].numpy()
    hidden = batch.hidden_TNH[start:stop].reshape(-1).view(torch.uint8).numpy()
    return StoredSample(sample_id, start, stop - start, _checksum(hidden, ids_T), token_digest(ids_T))


def _checksum(hidden: np.ndarray, ids: np.ndarray) -> str:
    return digest((digest(hidden) + digest(ids)).encode())


def read_entry(file: Path, identity: FeatureIdentity) -> ShardEntry:
    """What a shard says of itself. Raises ArtifactError where it is damaged or of another capture."""
    header = _read_header(file)
    with foreign_errors(ArtifactError, f"{file} is damaged; {remedy(file)}"):
        said = _Metadata.model_validate_json(header.said.spec_trainer)
    if said.identity != identity.digest:
        raise ArtifactError(f"{file} is of another capture (target, data, layers or dtype); {remedy(file)}")
    return ShardEntry(file.name, digest(header.content), rows(said.samples))


class Shard:
    """A shard that an index lists. Any thread may read it."""

    def __init__(self, root: Path, entry: ShardEntry, schema: FeatureSchema) -> None:
        """Reads the header alone. Raises ArtifactError where file and index disagree."""
        self.file = root / entry.file
        self._row_bytes = schema.bytes_per_token()
        header = _read_header(self.file)
        if digest(header.content) != entry.header_checksum:
            raise ArtifactError(f"{self.file} is damaged: its header's checksum differs; {remedy(self.file)}")
        shape = [entry.num_tokens, len(schema.layers), schema.hidden_size]
        if header.hidden_states.shape != shape or header.input_ids.shape != shape[:1]:
            raise ArtifactError(f"{self.file} holds other shapes than the index says; {remedy(self.file)}")
        places = (header.hidden_states, self._row_bytes), (header.input_ids, _ID_BYTES)
        if any(tensor.num_bytes != entry.num_tokens * row_bytes for tensor, row_bytes in places):
            raise ArtifactError(
                f"{self.file} is damaged: a tensor has other bytes than its shape; {remedy(self.file)}"
            )
        start = _LENGTH_BYTES + len(header.content)
        self._hidden_at = start + header.hidden_states.data_offsets[0]
        self._ids_at = start + header.input_ids.data_offsets[0]

    def read(self, sample: StoredSample) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the hidden states, uint8 [T · N · H · itemsize], and ids, int64 [T]; views of the file. Raises
        RunError where the file has changed since it was written."""
        hidden = self._bytes(self._hidden_at, sample, self._row_bytes)
        ids = self._bytes(self._ids_at, sample, _ID_BYTES).view("<i8")
        if _checksum(hidden, ids) != sample.checksum:
            raise RunError(
                f"{self.file}: the features of sample {sample.sample_id} are damaged (their checksum differs); "
                f"{remedy(self.file)}"
            )
        return hidden, ids

    def _bytes(self, origin: int, sample: StoredSample, row_bytes: int) -> np.ndarray:
        start = origin + sample.offset * row_bytes
        return self._map[start : start + sample.num_tokens * row_bytes]

    @cached_property
    def _map(self) -> np.ndarray:
        # Copy on write: torch takes no read-only memory. Nobody writes to it.
        return np.memmap(self.file, dtype=np.uint8, mode="c").view(np.ndarray)


class _Tensor(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    dtype: str
    shape: list[Number]
    data_offsets: tuple[Number, Number]

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class _Said(pydantic.BaseModel):
    spec_trainer: str
    """``_Metadata`` as JSON: safetensors' metadata are strings."""


class _Metadata(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    identity: str
    samples: Columns


class _Header(pydantic.BaseModel):
    """The header of a shard's safetensors file: 8 bytes of length, and that much JSON."""

    model_config = pydantic.ConfigDict(strict=True)

    said: _Said = pydantic.Field(alias="__metadata__")
    hidden_states: _Tensor
    input_ids: _Tensor
    _content: bytes = pydantic.PrivateAttr(b"")

    @property
    def content(self) -> bytes:
        """As stored."""
        return self._content


def _read_header(file: Path) -> _Header:
    """ArtifactError where the file is no whole shard."""
    if not file.exists():
        raise ArtifactError(f"{file} is missing; run the capture again, which captures that shard only")
    check_regular(file, ArtifactError)
    with foreign_errors(ArtifactError, f"{file} is damaged; {remedy(file)}"), file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        content = stream.read(min(length, _MAX_HEADER_BYTES))
        header = _Header.model_validate_json(content)
        ends = (header.hidden_states.data_offsets[1], header.input_ids.data_offsets[1])
        if _LENGTH_BYTES + len(content) + max(ends) != os.fstat(stream.fileno()).st_size:
            raise ValueError("it does not end where its header says")
    header._content = content
    return header
