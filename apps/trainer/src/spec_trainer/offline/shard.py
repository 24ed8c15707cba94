"""Read and write shards: safetensors files with the features of some samples, written atomically.

``hidden_states`` [T, N, H], as ``FeatureSchema.sent`` says, and ``input_ids`` int64 [T] hold the shard's samples one
after the other. The file's metadata has ids, positions and checksums of the samples, so that a shard can be read
before the index is written. This module imports torch only to read and write features.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pydantic
from safetensors import SafetensorError, safe_open

from spec_core import foreign_errors
from spec_core.errors import ArtifactError, RunError
from spec_core.foreign import check_regular
from spec_kit.sharding.safetensors_folder import DTYPE_CODES
from spec_trainer.base.disk import follow_umask, new_folder, not_written
from spec_trainer.offline.index import (
    ShardEntry,
    StoredSample,
    StoredSamples,
    columns,
    digest,
    sample_digest,
    token_digest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core.records import DraftBatch, ImageSource
    from spec_trainer.offline.index import FeatureIdentity

SCRATCH = ".partial-"
"""Prefix of the folder in which a shard is being written."""
_HIDDEN, _IDS, _METADATA = "hidden_states", "input_ids", "spec_trainer"
_LENGTH_BYTES = 8


def remedy(file: Path) -> str:
    """Return what to do about a damaged shard, as a part of an error message."""
    return f"delete {file} and run the capture again, which captures that shard only"


def write_shard(
    file: Path,
    batch: DraftBatch,
    identity: FeatureIdentity,
    images: Mapping[int, Sequence[ImageSource]] | None = None,
) -> None:
    """Write the samples of ``batch``, a batch without padding, into a shard; the write is atomic.

    ``images``: sample id -> the sample's images, for samples that have any.

    Raise RunError if the disk is full.
    """
    from safetensors.torch import save_file

    shown = images or {}
    samples = [
        _stored(batch, span.sample_id, span.start, span.stop, shown.get(span.sample_id, ()))
        for span in batch.spans
    ]
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
    """Return the path in a new temporary folder at which ``file`` is written first.

    The folder is needed because safetensors creates further files next to its output.
    """
    return new_folder(file.parent, SCRATCH) / file.name


def _stored(
    batch: DraftBatch, sample_id: int, start: int, stop: int, images: Sequence[ImageSource]
) -> StoredSample:
    hidden_TNH, ids_T = batch.hidden_TNH[start:stop], batch.input_ids_T[start:stop]
    return StoredSample(
        sample_id, start, stop - start, _checksum(hidden_TNH, ids_T), sample_digest(ids_T.numpy(), images)
    )


def _checksum(hidden_TNH: Tensor, ids_T: Tensor) -> str:
    import torch

    parts = [digest(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in (hidden_TNH, ids_T)]
    return digest("".join(parts).encode())


class _Metadata(pydantic.BaseModel):
    """The metadata of a shard, which is stored in the safetensors header as one JSON string."""

    model_config = pydantic.ConfigDict(strict=True)

    identity: str
    samples: StoredSamples


def read_entry(file: Path, identity: FeatureIdentity) -> ShardEntry:
    """Return a shard's entry for the index, which is made from the header of its file.

    Raise ArtifactError if the shard is damaged or belongs to another capture.
    """
    shard, header_checksum = _open(file)
    with foreign_errors(ArtifactError, f"{file} is damaged; {remedy(file)}"):
        found = _Metadata.model_validate_json(shard.metadata()[_METADATA])
    if found.identity != identity.digest:
        raise ArtifactError(f"{file} is of another capture (target, data, layers or dtype); {remedy(file)}")
    return ShardEntry(file=file.name, header_checksum=header_checksum, **found.samples.model_dump())


class Shard:
    """Reader of a shard that is listed in an index. Thread-safe."""

    def __init__(self, root: Path, entry: ShardEntry, identity: FeatureIdentity) -> None:
        """Read only the header. Raise ArtifactError if file and index disagree."""
        self.file = root / entry.file
        shard, header_checksum = _open(self.file)
        if header_checksum != entry.header_checksum:
            raise ArtifactError(f"{self.file} is damaged: its header's checksum differs; {remedy(self.file)}")
        if read_entry(self.file, identity) != entry:
            raise ArtifactError(f"{self.file} holds other samples than the index says; {remedy(self.file)}")
        schema = identity.schema.sent
        num_tokens = sum(entry.num_tokens)
        expected = {
            _HIDDEN: (DTYPE_CODES.get(schema.dtype), list(schema.shape(num_tokens))),
            _IDS: ("I64", [num_tokens]),
        }
        stored = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (no dict)
        found = {name: (part.get_dtype(), part.get_shape()) for name, part in stored.items()}
        if found != expected:
            raise ArtifactError(
                f"{self.file} holds other dtypes or shapes than the index says; {remedy(self.file)}"
            )

    def read(self, sample: StoredSample) -> tuple[Tensor, Tensor]:
        """Return a sample's hidden states [T, N, H] and token ids, int64 [T].

        Raise RunError if the file has changed since it was written.
        """
        where = slice(sample.offset, sample.offset + sample.num_tokens)
        hidden_TNH, ids_T = (self._tensors.get_slice(name)[where] for name in (_HIDDEN, _IDS))
        sound = token_digest(ids_T.numpy()) == sample.token_digest.partition("-")[0]
        if not sound or _checksum(hidden_TNH, ids_T) != sample.checksum:
            raise RunError(
                f"{self.file}: the features of sample {sample.sample_id} are damaged (their checksum differs); "
                f"{remedy(self.file)}"
            )
        return hidden_TNH, ids_T

    @cached_property
    def _tensors(self) -> Any:
        return safe_open(self.file, framework="pt")


def _open(file: Path) -> tuple[Any, str]:
    """Open a safetensors file and return it with its header's checksum.

    Raise ArtifactError if the file is missing, damaged or incomplete.
    """
    if not file.exists():
        raise ArtifactError(f"{file} is missing; run the capture again, which captures that shard only")
    check_regular(file, ArtifactError)
    with foreign_errors(ArtifactError, f"{file} is damaged; {remedy(file)}"), file.open("rb") as stream:
        shard = safe_open(file, framework="np")  # which bounds the length of the header
        return shard, digest(stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "little")))
