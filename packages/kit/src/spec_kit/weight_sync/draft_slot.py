"""DraftSlot holds a rank's two copies of the draft; DraftLayout lists the tensors an update must have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from spec_core import foreign_errors
from spec_core.errors import ArtifactError, EngineError
from spec_core.weight_manifest import maps_vocabulary, vocabulary_digest
from spec_kit.weight_sync.digest import dtype_name, tensor_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from spec_core import Manifest, TargetSpec
    from spec_core.weight_manifest import TensorEntry

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DraftLayout:
    """The shapes, dtypes, target and vocabulary of a rank's draft, which every update must match."""

    target: str
    """``TargetSpec.digest`` of the target that the engine runs."""
    vocabulary: str
    """``Manifest.vocabulary`` of the draft; a running engine cannot change it."""
    tensors: Mapping[str, tuple[Shape, str]]
    """Name of each exported tensor -> its shape and torch's name of its dtype."""

    @classmethod
    def of_tensors(cls, tensors: Iterable[tuple[str, Tensor]], target: str) -> Self:
        """Return the layout of exported tensors. ``target``: digest of the target they were trained for."""
        found: dict[str, tuple[Shape, str]] = {}
        mapping: list[TensorEntry] = []
        for name, tensor in tensors:
            found[name] = tuple(tensor.shape), dtype_name(tensor)
            if maps_vocabulary(name):
                mapping.append(tensor_entry(name, tensor))
        return cls(target=target, vocabulary=vocabulary_digest(mapping), tensors=found)

    @classmethod
    def of_folder(cls, folder: Path, target: TargetSpec) -> Self:
        """Return the layout of the exported draft in ``folder``. ``target``: the target that the engine runs.

        Raise ArtifactError if model.safetensors cannot be read.
        """
        from safetensors import safe_open

        file = folder / "model.safetensors"
        with (
            foreign_errors(ArtifactError, f"draft tensors {file} cannot be read"),
            safe_open(file, framework="pt") as tensors,
        ):
            names = list(tensors.keys())
            return cls.of_tensors(((name, tensors.get_tensor(name)) for name in names), target.digest)

    def check(self, manifest: Manifest) -> None:
        """Raise EngineError, with a message of one line, if an update does not match this layout."""
        problems = [
            *self._differences(manifest),
            *(["it was trained for another target"] if manifest.target != self.target else []),
            *(["it maps the vocabulary differently"] if manifest.vocabulary != self.vocabulary else []),
        ]
        if problems:
            raise EngineError(
                f"version {manifest.version} does not fit the draft that is served: {problems[0]}"
            )

    def _differences(self, manifest: Manifest) -> Iterator[str]:
        found = {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors}
        if missing := sorted(self.tensors.keys() - found.keys()):
            yield f"it lacks {', '.join(missing)}"
        if unknown := sorted(found.keys() - self.tensors.keys()):
            yield f"it has {', '.join(unknown)} besides"
        for name, (shape, dtype) in found.items():
            if name in self.tensors and (shape, dtype) != self.tensors[name]:
                expected, expected_dtype = self.tensors[name]
                yield f"{name} is {dtype} {list(shape)}, expected {expected_dtype} {list(expected)}"


class DraftSlot(ABC):
    """Two copies of a draft's tensors in one rank: the live copy, which serves, and a spare copy."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device on which the tensors of an update should arrive."""

    @abstractmethod
    def layout(self) -> DraftLayout:
        """Return the layout that every update must match."""

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load all tensors of an update into the spare copy, on a separate thread, while the live copy serves.

        The thread's current device is ``device``; its exclusive stream is synchronized before a swap. A tensor
        is valid until the next ``next()`` of ``weights``. The iterator compares each tensor's name, shape and
        dtype with the manifest, and all bytes after the last tensor. If it raises, the error must be passed on.
        The spare copy's content is then undefined and never served.
        """

    @abstractmethod
    def swap(self) -> None:
        """Exchange the copies, recompute data derived from the weights, and reset the acceptance counters.

        It runs on the thread that calls ``commit`` or ``revert`` of the receiver, between two steps of the
        engine. If it raises, the engine must draft with the old version, or not at all.
        """
