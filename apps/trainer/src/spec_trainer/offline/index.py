"""Read and write a feature folder's ``index.json``: identity, sample positions and checksums.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Self

import pydantic

from spec_core import foreign_errors
from spec_core.errors import ArtifactError
from spec_core.foreign import read_bytes
from spec_core.records import FeatureSchema
from spec_core.wording import counted
from spec_trainer.base.disk import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy as np

    from spec_core.records import ImageSource
    from spec_trainer.data.dataset import Dataset

INDEX_FILE = "index.json"
FORMAT = "spec-trainer features 1"

_MAX_INDEX_BYTES = 1 << 30  # some 100 bytes a sample
_REMEDY = "delete it and run the capture again, which keeps every complete shard"
_STRICT = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)

_Number = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


def _with_known_size(schema: FeatureSchema) -> FeatureSchema:
    schema.bytes_per_token()  # ValueError for a dtype that does not say its bits
    return schema


@dataclass(frozen=True, kw_only=True)
class FeatureIdentity:
    """Identity of a folder's features. It includes token ids, but not loss masks or the held-out split."""

    __pydantic_config__ = _STRICT

    schema: Annotated[FeatureSchema, pydantic.AfterValidator(_with_known_size)]
    target_digest: str
    data_digest: str
    """Digest of the token ids of every sample, in order."""
    num_samples: _Number
    shard_bytes: _Number

    def differences(self, wanted: FeatureIdentity) -> list[str]:
        """Return a text for each field in which ``wanted`` differs, such as ``layers [2] there, [5] here``."""
        there, here = _flat(self), _flat(wanted)
        return [f"{key} {there[key]} there, {here[key]} here" for key in there if there[key] != here[key]]

    @property
    def digest(self) -> str:
        """Digest of all fields, which is stored in each shard."""
        return digest(json.dumps(asdict(self), sort_keys=True).encode())


@dataclass(frozen=True)
class StoredSample:
    """Position and checksums of a sample in a shard.

    It has the tokens ``offset`` to ``offset + num_tokens`` of the shard.
    """

    sample_id: int
    """Index of the sample in the captured data: training samples in file order, then held-out samples."""
    offset: int
    num_tokens: int
    checksum: str
    """Checksum of the sample's stored hidden states and token ids."""
    token_digest: str
    """Digest of the sample's tokens and images (``sample_digest``). A run finds the sample by it, whatever
    its id in the run."""


class StoredSamples(pydantic.BaseModel):
    """Consecutive samples of a shard, stored as one list per field, so that a large index stays small."""

    model_config = _STRICT

    sample_id: list[_Number]
    offset: list[_Number]
    num_tokens: list[Annotated[_Number, pydantic.Field(gt=0)]]
    checksum: list[str]
    token_digest: list[str]

    @pydantic.model_validator(mode="after")
    def _one_after_the_other(self) -> Self:
        if len({len(getattr(self, name)) for name in StoredSamples.model_fields}) != 1:
            raise ValueError("the columns of its samples have different lengths")
        ends = list(itertools.accumulate(self.num_tokens, initial=0))
        if self.offset != ends[:-1]:
            raise ValueError("its samples do not lie one after the other")
        return self

    @cached_property
    def samples(self) -> tuple[StoredSample, ...]:
        """The samples as a tuple with a StoredSample for each."""
        columns = (getattr(self, name) for name in StoredSamples.model_fields)
        return tuple(itertools.starmap(StoredSample, zip(*columns, strict=True)))


class ShardEntry(StoredSamples):
    """Index entry of one shard: its file and its samples."""

    file: Annotated[str, pydantic.Field(pattern=r"^features-\d{5,9}\.safetensors$")]
    header_checksum: str


class FeatureIndex(pydantic.BaseModel):
    """The content of ``index.json``."""

    model_config = _STRICT

    identity: FeatureIdentity
    shards: tuple[ShardEntry, ...]
    complete: bool
    """Whether the capture has finished."""

    @pydantic.model_validator(mode="after")
    def _no_shard_twice(self) -> Self:
        if len({shard.file for shard in self.shards}) != len(self.shards):
            raise ValueError("it lists a shard twice")
        return self

    @pydantic.model_validator(mode="after")
    def _complete_one_has_every_sample(self) -> Self:
        if not self.complete:
            return self
        samples = sorted(
            itertools.chain.from_iterable(
                zip(shard.sample_id, shard.token_digest, strict=True) for shard in self.shards
            )
        )
        if [sample_id for sample_id, _ in samples] != list(range(len(samples))):
            raise ValueError("its samples are not numbered from 0, each once")
        if len(samples) != self.identity.num_samples:
            raise ValueError(f"it lists {len(samples)} of {counted(self.identity.num_samples, 'sample')}")
        if _joint_digest(own for _, own in samples) != self.identity.data_digest:
            raise ValueError("its data_digest is not that of its samples")
        return self


def digest(content: bytes | bytearray | memoryview | np.ndarray) -> str:
    """Return the BLAKE2b checksum (16 bytes) of ``content``, as hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def token_digest(input_ids: np.ndarray) -> str:
    """Return the digest of a sample's token ids, by which a run finds the sample."""
    return digest(input_ids.astype("<i4").tobytes())


def sample_digest(input_ids: np.ndarray, images: Sequence[ImageSource]) -> str:
    """Return the digest of a sample's token ids and, after a dash, of its images, if it has any.

    A run finds the sample by this digest.
    """
    tokens = token_digest(input_ids)
    return f"{tokens}-{digest(''.join(image.digest for image in images).encode())}" if images else tokens


def data_digest(dataset: Dataset) -> str:
    """Return the digest of the token ids and images of every sample, in order."""
    return _joint_digest(sample_digest(sample.input_ids, sample.images) for sample in dataset.samples)


def _joint_digest(token_digests: Iterable[str]) -> str:
    return digest("".join(token_digests).encode())


def columns(samples: Iterable[StoredSample]) -> dict[str, list[Any]]:
    """Return the samples as one list of values per field, the form of ``StoredSamples``."""
    rows = list(samples)
    return {name: [getattr(row, name) for row in rows] for name in StoredSamples.model_fields}


def write_index(root: Path, index: FeatureIndex) -> None:
    """Write ``index.json`` atomically."""
    shards = [shard.model_dump() for shard in index.shards]
    body = {"format": FORMAT, "complete": index.complete, **asdict(index.identity), "shards": shards}
    write_atomically(root / INDEX_FILE, json.dumps({"checksum": _checksum(body), **body}) + "\n")


def read_index(root: Path) -> FeatureIndex:
    """Return the index of a folder. Raise ArtifactError if it is missing or damaged."""
    file = root / INDEX_FILE
    if not file.is_file():
        raise ArtifactError(f"{root} holds no {INDEX_FILE}: it is no folder that spec-trainer capture wrote")
    text = read_bytes(file, ArtifactError, _MAX_INDEX_BYTES)
    with foreign_errors(ArtifactError, f"{file} is damaged; {_REMEDY}"):
        body = json.loads(text)
        if body.pop("checksum") != _checksum(body):
            raise ValueError("its checksum differs")
        if body.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        parts = {name: body.pop(name) for name in ("complete", "shards")}
        return FeatureIndex.model_validate_json(json.dumps({**parts, "identity": body}))


def _checksum(body: dict[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())


def _flat(identity: FeatureIdentity) -> dict[str, Any]:
    """Return the fields of an identity for error messages, the most informative fields first."""
    schema = identity.schema
    return {
        "target": identity.target_digest[:12],
        "layers": list(schema.layers),
        "hidden size": schema.hidden_size,
        "dtype": schema.dtype,
        "data.features_dtype": schema.sent_dtype,
        "samples": identity.num_samples,
        "data": identity.data_digest[:12],
        "capture.shard_bytes": identity.shard_bytes,
    }
