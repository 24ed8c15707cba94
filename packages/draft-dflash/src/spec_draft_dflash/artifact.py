"""A published DFlash draft: recognised, checked tensor by tensor, and read. Imports without torch."""

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
from spec_draft_dflash.shape import DraftShape

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from spec_core.target import TargetSpec

ARCHITECTURE = "DFlashDraftModel"
EMBEDDING = "embed_tokens.weight"
_MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True)
class Artifact:
    """A folder whose config.json and tensor names and shapes have been checked."""

    folder: Path
    shape: DraftShape
    stored_names: dict[str, str]
    """Name in the module -> name in the file."""
    embedding: str | None
    """Name in the file of the draft's own copy of the target's embedding, scale included."""

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """None if ``folder`` holds no DFlash draft; ArtifactError if it holds a damaged one."""
        fields = read_config(folder)
        if fields is None or ARCHITECTURE not in architectures(fields):
            return None
        shape = DraftShape.from_json(fields, folder)
        if (folder / _MASK_FILE).exists():
            raise ArtifactError(
                f"draft {folder} has a {_MASK_FILE}; only a token's own embedding can be the mask"
            )
        stored = read_shapes(folder)
        names = canonical_names(stored, folder, lambda name: name.removeprefix("model."))
        embedding = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
        check_shapes(folder, {name: stored[names[name]] for name in names}, shape.tensor_shapes(), embedding)
        own_embedding = names.pop(EMBEDDING, None)
        return cls(folder, shape, names, own_embedding)

    def check_embedding(self, target: TargetSpec) -> None:
        """Ours is always the target's; a folder that stores another one was trained with that."""
        if self.embedding is not None:
            check_embedding(self.folder, self.embedding, target, target.embedding_scale)

    def read(self) -> dict[str, Tensor]:
        """The module's state dict, float32."""
        tensors = load_tensors(self.folder, self.stored_names)
        return {name: tensor.float() for name, tensor in tensors.items()}
