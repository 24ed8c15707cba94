"""Manifest: what one update of a draft's weights holds, and what it belongs to."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from spec_core.wire_record import WireRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

Count = Annotated[int, pydantic.Field(ge=0)]

_MAPPING = ("d2t", "t2d")
"""Last part of the names of the tensors that map a draft's vocabulary to the target's."""


class TensorEntry(WireRecord):
    """One tensor of an update."""

    name: str
    """As the draft exports it, so as engines load it."""
    shape: tuple[Count, ...]
    dtype: str
    """Torch's name of it, such as ``bfloat16``."""
    num_bytes: Count
    digest: str
    """``spec_kit.weight_sync.tensor_digest`` of its bytes."""


class Manifest(WireRecord):
    """The tensors of one update in the order in which they are sent, with what they were made for."""

    format: Literal[1] = 1
    group: str
    """Name of the update group: several drafts can be pushed at once, independent of each other."""
    version: Count
    """Rises with every push of new weights."""
    parent: Count | None = None
    """Version that was served before, as the publisher knows it."""
    fence: int
    """Fence of the trainer that made it; a later trainer has a higher one."""
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
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors)

    @property
    def digest(self) -> str:
        """Digest of the whole content: names, shapes, dtypes and bytes. Two versions of equal weights share it."""
        return entries_digest(self.tensors)

    @property
    def vocabulary(self) -> str:
        """Digest of the mapping to the target's vocabulary; empty for a draft that has the target's own."""
        return vocabulary_digest(self.tensors)


def entries_digest(entries: Iterable[TensorEntry]) -> str:
    """Return one digest of several tensors, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for entry in sorted(entries, key=lambda entry: entry.name):
        digest.update(json.dumps([entry.name, entry.shape, entry.dtype, entry.digest]).encode() + b"\n")
    return digest.hexdigest()


def vocabulary_digest(entries: Iterable[TensorEntry]) -> str:
    """Return the digest of those tensors that map the vocabulary; empty where there is none."""
    mapping = [entry for entry in entries if maps_vocabulary(entry.name)]
    return entries_digest(mapping) if mapping else ""


def maps_vocabulary(name: str) -> bool:
    """Return whether a tensor of that name maps the draft's vocabulary to the target's."""
    return name.rpartition(".")[2] in _MAPPING
