"""DraftCheckpoint is a draft's served folder, checked; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from spec_core.errors import ArtifactError
from spec_kit.drafting.draft_files import load_tensors
from spec_kit.drafting.draft_shape import DraftShape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_core import TargetSpec

S = TypeVar("S", bound=DraftShape)


@dataclass(frozen=True)
class DraftCheckpoint(Generic[S]):
    """A draft's served folder, whose config.json and tensor names, shapes and dtypes have been checked."""

    folder: Path
    shape: S
    stored_names: Mapping[str, str]
    """Name in the module -> name in the file, without copies of the target's embedding and head."""
    embedding: str | None
    """Name in the file of a copy of the target's embedding; None if there is none."""
    head: str | None = None
    """Name in the file of a copy of the target's head, if the draft has no trained head."""
    trained_depth: int | None = None
    """How many tokens ahead the draft was trained to guess, if config.json says it."""

    def load(self, *names: str) -> dict[str, Tensor]:
        """Return tensors with the dtypes of the file. ``names``: their names in the module."""
        return load_tensors(self.folder, {name: self.stored_names[name] for name in names})

    def check_embedding(self, target: TargetSpec, scale: float) -> None:
        """Raise ArtifactError if the copy of the embedding is not ``scale`` times the target's embedding.

        Training and some engines use the target's embedding anyway. Only a sample of rows is compared, to the
        precision of bfloat16.
        """
        from spec_kit.targets.target_reader import read_target_tensors

        if self.embedding is not None and not self._holds(
            self.embedding, read_target_tensors(target).embedding_VH, scale
        ):
            raise ArtifactError(
                f"draft {self.folder}: its {self.embedding} is not the embedding of target {target.folder}: it was "
                "made for another target, or trained its own, which not every engine loads"
            )

    def check_head(self, target: TargetSpec) -> None:
        """Raise ArtifactError if the copy of the head, or of some of its rows, differs from the target's head."""
        if self.head is None:
            return
        from spec_kit.drafting.draft_vocabulary import read_mapping
        from spec_kit.targets.target_reader import read_target_tensors

        head_VH = read_target_tensors(target).head_VH
        if self.shape.reduced:
            head_VH = head_VH[read_mapping(self)["t2d"]]
        if not self._holds(self.head, head_VH, 1.0):
            raise ArtifactError(
                f"draft {self.folder}: its {self.head} is not the head of target {target.folder}: it was made for "
                "another target, or trained its own"
            )

    def _holds(self, name: str, wanted_VH: Tensor, scale: float) -> bool:
        import torch

        found_VH = load_tensors(self.folder, {name: name})[name]
        rows = torch.arange(0, len(wanted_VH), max(1, len(wanted_VH) // 256))
        return found_VH.shape == wanted_VH.shape and torch.allclose(
            found_VH[rows].float(), scale * wanted_VH[rows].float(), rtol=2**-8, atol=1e-6
        )
