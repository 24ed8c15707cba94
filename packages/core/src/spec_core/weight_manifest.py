"""A Manifest lists the tensors of one update of a draft, with version, update group and target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Literal

import pydantic

from spec_core.wire_record import WireRecord

Count = Annotated[int, pydantic.Field(ge=0)]

_MAPPING = ("d2t", "t2d")
"""Last components of the names of the tensors that map a draft's vocabulary to the target's vocabulary."""


class TensorEntry(WireRecord):
    """Name, dtype, shape and digest of one tensor of an update."""

    name: str
    """Name of the tensor in the draft's export, which engines load."""
    shape: tuple[Count, ...]
    dtype: str
    """Torch's name of the dtype, such as ``bfloat16``."""
    num_bytes: Count
    digest: str
    """``spec_kit.weight_sync.tensor_digest`` of the tensor's bytes."""


class Manifest(WireRecord):
    """The tensors of one update, in the order of sending, with version, update group and target."""

    format: Literal[1] = 1
    group: str
    """Name of the update group. Updates of different groups are independent of each other."""
    version: Count
    """Version of the weights; it rises with every push of new weights."""
    parent: Count | None = None
    """Version that was served before this update, as far as the publisher knows."""
    fence: int
    """Fencing number of the trainer that made the update; a later trainer has a higher number."""
    target: str
    """``TargetSpec.digest`` of the target that the draft was trained for."""
    tensors: tuple[TensorEntry, ...]

    @pydantic.field_validator("tensors")
    @classmethod
    def _check_names(cls, tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
        names = [entry.name for entry in tensors]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} stands in it twice")
        return tensors

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors together."""
        return sum(entry.num_bytes for entry in self.tensors)

    @property
    def digest(self) -> str:
        """Digest of names, shapes, dtypes and bytes of all tensors.

        Two versions with equal weights have the same digest.
        """
        return entries_digest(self.tensors)

    @property
    def vocabulary(self) -> str:
        """Digest of the tensors that map the draft's vocabulary to the target's; empty if both are the same."""
        return vocabulary_digest(self.tensors)


def entries_digest(entries: Iterable[TensorEntry]) -> str:
    """Return one digest of several tensors; it does not depend on their order."""
    digest = hashlib.blake2b(digest_size=16)
    for entry in sorted(entries, key=lambda entry: entry.name):
        digest.update(json.dumps([entry.name, entry.shape, entry.dtype, entry.digest]).encode() + b"\n")
    return digest.hexdigest()


def vocabulary_digest(entries: Iterable[TensorEntry]) -> str:
    """Return the digest of the tensors that map the draft's vocabulary; empty if there are none."""
    mapping = [entry for entry in entries if maps_vocabulary(entry.name)]
    return entries_digest(mapping) if mapping else ""


def maps_vocabulary(name: str) -> bool:
    """Return whether a tensor called ``name`` maps the draft's vocabulary to the target's vocabulary."""
    return name.rpartition(".")[2] in _MAPPING
