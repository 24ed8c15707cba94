"""``index.json`` of a folder of features: whose they are, where each sample lies, checksums. Imports no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import pydantic

from spec_core.errors import ArtifactError
from spec_core.foreign import foreign_errors, read_bytes
from spec_core.records import FeatureSchema
from spec_trainer.run_directory import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy as np

    from spec_trainer.data.dataset import Dataset

INDEX_FILE = "index.json"
FORMAT = "spec-trainer features 1"

_MAX_INDEX_BYTES = 1 << 30  # some 100 bytes a sample
_REMEDY = "delete it and run the capture again, which keeps every complete shard"
_COLUMNS = ("sample_id", "offset", "num_tokens", "checksum", "token_digest")


@dataclass(frozen=True, kw_only=True)
class FeatureIdentity:
    """What a folder holds. Features depend on token ids alone: masks and the held-out split may change."""

    schema: FeatureSchema
    target_digest: str
    data_digest: str
    """Over the token ids of every sample, in order."""
    num_samples: int
    shard_bytes: int

    def differences(self, wanted: FeatureIdentity) -> list[str]:
        """``layers [2, 4] there, [2, 5] here`` and the like."""
        there, here = _flat(self), _flat(wanted)
        return [f"{key} {there[key]} there, {here[key]} here" for key in there if there[key] != here[key]]

    @property
    def digest(self) -> str:
        return digest(json.dumps(asdict(self), sort_keys=True).encode())


@dataclass(frozen=True)
class StoredSample:
    """Rows ``offset`` to ``offset + num_tokens`` of its shard."""

    sample_id: int
    """Its number in the data that was captured: training samples in the order of the files, then held-out ones."""
    offset: int
    num_tokens: int
    checksum: str
    """Of its hidden states and token ids, as stored."""
    token_digest: str
    """Of its token ids: by it a run finds the sample, whatever number it has there."""


@dataclass(frozen=True)
class ShardEntry:
    file: str
    header_checksum: str
    samples: tuple[StoredSample, ...]

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)


@dataclass(frozen=True)
class FeatureIndex:
    identity: FeatureIdentity
    shards: tuple[ShardEntry, ...]
    complete: bool
    """False while the capture is under way, or was interrupted."""


def digest(content: bytes | bytearray | memoryview | np.ndarray) -> str:
    """The one checksum of these folders: BLAKE2b, 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def token_digest(input_ids: np.ndarray) -> str:
    return digest(input_ids.astype("<i4").tobytes())


def data_digest(dataset: Dataset) -> str:
    return digest("".join(token_digest(sample.input_ids) for sample in dataset.samples).encode())


def write_index(root: Path, index: FeatureIndex) -> None:
    identity = asdict(index.identity)
    body = {
        "format": FORMAT,
        "complete": index.complete,
        **identity,
        "shards": [
            {"file": s.file, "header_checksum": s.header_checksum, **columns(s.samples)} for s in index.shards
        ],
    }
    write_atomically(root / INDEX_FILE, json.dumps({"checksum": _checksum(body), **body}) + "\n")


def read_index(root: Path) -> FeatureIndex:
    """Raises ArtifactError where the folder has no index, or a damaged one."""
    file = root / INDEX_FILE
    if not file.is_file():
        raise ArtifactError(f"{root} holds no {INDEX_FILE}: it is no folder that spec-trainer capture wrote")
    text = read_bytes(file, ArtifactError, _MAX_INDEX_BYTES)
    with foreign_errors(ArtifactError, f"{file} is damaged; {_REMEDY}"):
        body = json.loads(text)
        if body.pop("checksum") != _checksum(body):
            raise ValueError("its checksum differs")
        return _Document.model_validate_json(json.dumps(body)).index()


def columns(samples: Iterable[StoredSample]) -> dict[str, list[Any]]:
    """One list per field: an index of a million samples stays readable for a machine."""
    rows = list(samples)
    return {name: [getattr(row, name) for row in rows] for name in _COLUMNS}


def rows(stored: Columns) -> tuple[StoredSample, ...]:
    return tuple(
        StoredSample(*values) for values in zip(*(getattr(stored, name) for name in _COLUMNS), strict=True)
    )


Number = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


class Columns(pydantic.BaseModel):
    """Samples as ``columns`` writes them, which lie one after the other."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    sample_id: list[Number]
    offset: list[Number]
    num_tokens: list[Annotated[Number, pydantic.Field(gt=0)]]
    checksum: list[str]
    token_digest: list[str]

    @pydantic.model_validator(mode="after")
    def _one_after_the_other(self) -> Self:
        if len({len(getattr(self, name)) for name in _COLUMNS}) != 1:
            raise ValueError("the columns of its samples have different lengths")
        ends = list(itertools.accumulate(self.num_tokens, initial=0))
        if self.offset != ends[:-1]:
            raise ValueError("its samples do not lie one after the other")
        return self


class _Schema(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    layers: tuple[int, ...]
    hidden_size: Number
    dtype: Annotated[str, pydantic.Field(pattern=r"^(bfloat|float)\d{1,2}\w{0,10}$")]


class _Shard(Columns):
    file: Annotated[str, pydantic.Field(pattern=r"^features-\d{5,9}\.safetensors$")]
    header_checksum: str


class _Document(pydantic.BaseModel):
    """``index.json``, its checksum taken away."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    format: Literal["spec-trainer features 1"]
    complete: bool
    stored: Annotated[_Schema, pydantic.Field(alias="schema")]
    target_digest: str
    data_digest: str
    num_samples: Number
    shard_bytes: Number
    shards: list[_Shard]

    def index(self) -> FeatureIndex:
        """Raises ValueError where its parts contradict each other."""
        if len({shard.file for shard in self.shards}) != len(self.shards):
            raise ValueError("it lists a shard twice")
        identity = FeatureIdentity(
            schema=FeatureSchema(**self.stored.model_dump()),
            target_digest=self.target_digest,
            data_digest=self.data_digest,
            num_samples=self.num_samples,
            shard_bytes=self.shard_bytes,
        )
        shards = tuple(ShardEntry(shard.file, shard.header_checksum, rows(shard)) for shard in self.shards)
        return FeatureIndex(identity, shards, self.complete)


def _checksum(body: dict[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())


def _flat(identity: FeatureIdentity) -> dict[str, Any]:
    """Under the words of the command line, most telling first."""
    schema = identity.schema
    return {
        "target": identity.target_digest[:12],
        "layers": list(schema.layers),
        "hidden size": schema.hidden_size,
        "dtype": schema.dtype,
        "samples": identity.num_samples,
        "data": identity.data_digest[:12],
        "capture.shard_bytes": identity.shard_bytes,
    }
