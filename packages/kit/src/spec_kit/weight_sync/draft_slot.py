"""DraftSlot: the two copies of a draft's weights in one rank of an engine; DraftLayout: what an update must hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from spec_core.errors import ArtifactError, EngineError
from spec_core.foreign import foreign_errors
from spec_core.weight_manifest import maps_vocabulary, vocabulary_digest
from spec_kit.weight_sync.digest import dtype_name, tensor_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from spec_core.target import TargetSpec
    from spec_core.weight_manifest import Manifest, TensorEntry

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DraftLayout:
    """The tensors of the draft that a rank was started with, and what they belong to: what it can take."""

    target: str
    """``TargetSpec.digest`` of the target that the engine runs."""
    vocabulary: str
    """``Manifest.vocabulary`` of the draft: another mapping would need another engine."""
    tensors: Mapping[str, tuple[Shape, str]]
    """Shape and dtype, by torch name, of each exported tensor."""

    @classmethod
    def of_tensors(cls, tensors: Iterable[tuple[str, Tensor]], target: str) -> Self:
        """Return the layout of exported tensors, made for the target of that digest."""
        found: dict[str, tuple[Shape, str]] = {}
        mapping: list[TensorEntry] = []
        for name, tensor in tensors:
            found[name] = tuple(tensor.shape), dtype_name(tensor)
            if maps_vocabulary(name):
                mapping.append(tensor_entry(name, tensor))
        return cls(target=target, vocabulary=vocabulary_digest(mapping), tensors=found)

    @classmethod
    def of_folder(cls, folder: Path, target: TargetSpec) -> Self:
        """Return the layout of an exported draft, for the target that an engine runs.

        Raise ArtifactError where its model.safetensors cannot be read.
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
        """Raise EngineError, in one line, for an update that does not go with what is served."""
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
    """The live copy of a draft's own tensors, which serves, and a spare one of the same size, in one rank."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return where new tensors should arrive."""

    @abstractmethod
    def layout(self) -> DraftLayout:
        """Return what an update must hold."""

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take all of an export's tensors into the spare copy, on a thread of its own, while the live one serves.

        The thread has ``device`` as its current one and a stream of its own, which is waited for before a swap.
        A tensor is valid until the next one is asked for. The iterator checks them against the manifest, their bytes
        after the last one, and raises where one is wrong; that error must pass through. The spare copy may then hold
        anything: it will not be swapped in.
        """

    @abstractmethod
    def swap(self) -> None:
        """Exchange the copies, rebuild what is derived from weights, and count acceptance anew.

        It is called where the engine calls ``commit`` or ``revert`` of the receiver, so between two of its steps.
        Where it raises, the engine drafts with the old version, or not at all.
        """
