"""A published Eagle3 draft: recognised, checked tensor by tensor, and read. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from spec_core.drafting.decoder_format import canonical_names
from spec_core.drafting.served_draft import (
    architectures,
    check_embedding,
    check_shapes,
    load_tensors,
    read_config,
    read_shapes,
)
from spec_core.errors import ArtifactError
from spec_draft_eagle3.shape import DraftShape

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from spec_core.drafting.served_draft import Json, Shapes
    from spec_core.target import TargetSpec

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ARCHITECTURES = {ARCHITECTURE, "Eagle3LlamaForCausalLM"}
_EMBEDDING = "embed_tokens.weight"
_MAPPING = ("d2t", "t2d")


@dataclass(frozen=True)
class Artifact:
    """A folder whose config.json and tensor names, shapes and vocabulary mapping have been checked."""

    folder: Path
    shape: DraftShape
    stored_names: dict[str, str]
    """Name in the module -> name in the file."""
    embedding: str | None
    """Name in the file of the draft's own copy of the target's embedding."""

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """None if ``folder`` holds no Eagle3 draft; ArtifactError if it holds a damaged one."""
        fields = read_config(folder)
        if fields is None or not _is_eagle3(fields):
            return None
        shape = DraftShape.from_json(fields, folder)
        stored = read_shapes(folder)
        names = canonical_names(stored, folder, _canonical)
        embedding = names.pop(_EMBEDDING, None)
        mapping: Shapes = {"d2t": (shape.vocab_size,), "t2d": (shape.target_vocab_size,)}
        required = shape.tensor_shapes() | ({"d2t": mapping["d2t"]} if shape.reduced else {})
        check_shapes(folder, {name: stored[names[name]] for name in names}, required, mapping)
        artifact = cls(folder, shape, names, embedding)
        if "d2t" in names:
            artifact._read_mapping()
        return artifact

    def read(self) -> dict[str, Tensor]:
        """The module's state dict: weights as float32, the vocabulary mapping as stored."""
        weights = {name: tensor.float() for name, tensor in self._load(self.shape.tensor_shapes()).items()}
        return weights | (self._read_mapping() if self.shape.reduced else {})

    def check_embedding(self, target: TargetSpec) -> None:
        """Ours is always the target's; a folder that stores another one was trained with that."""
        if self.embedding is not None:
            check_embedding(self.folder, self.embedding, target)

    def _read_mapping(self) -> dict[str, Tensor]:
        import torch

        from spec_draft_eagle3.vocabulary import mapping

        stored = self._load(name for name in _MAPPING if name in self.stored_names)
        ids_V = torch.arange(self.shape.vocab_size) + stored["d2t"].long()
        total = self.shape.target_vocab_size
        if ids_V.min() < 0 or ids_V.max() >= total:
            raise ArtifactError(
                f"draft {self.folder}: d2t maps rows to ids {int(ids_V.min())} to {int(ids_V.max())}, the target's "
                f"vocabulary has 0 to {total - 1}"
            )
        if not bool((ids_V.diff() > 0).all()):
            raise ArtifactError(f"draft {self.folder}: d2t does not map its rows to strictly ascending ids")
        if not self.shape.reduced and stored["d2t"].any():
            raise ArtifactError(
                f"draft {self.folder}: d2t permutes a full vocabulary; it must be 0 or absent"
            )
        expected = mapping(ids_V, total)
        if "t2d" in stored and not torch.equal(stored["t2d"].bool(), expected["t2d"]):
            raise ArtifactError(f"draft {self.folder}: t2d and d2t do not describe the same vocabulary")
        return expected

    def _load(self, names: Iterable[str]) -> dict[str, Tensor]:
        return load_tensors(self.folder, {name: self.stored_names[name] for name in names})


def _is_eagle3(fields: Json) -> bool:
    """By architecture; EAGLE's own files say LlamaForCausalLM and are known by their draft vocabulary."""
    named = architectures(fields)
    return bool(named & _ARCHITECTURES) or ("LlamaForCausalLM" in named and "draft_vocab_size" in fields)


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
