"""Check whether one engine can serve a draft's folder.

The draft's plugin has already checked the folder (``draft_files``). An engine's parser may still read it in another
way, or crash. Each engine's plugin has a table of such flaws. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from spec_core import Draft, TargetSpec
from spec_core.errors import ArtifactError
from spec_kit.drafting.draft_files import Json, architectures, exported_config, read_config, read_shapes
from spec_kit.targets.safetensors_index import stored_tensors


@dataclass(frozen=True)
class ServedFolder:
    """A served draft's folder as an engine's parser sees it."""

    fields: Json
    """Content of config.json."""
    tensors: frozenset[str]
    """Names of the tensors in the folder's weights."""
    target: TargetSpec

    @property
    def architectures(self) -> set[str]:
        """Names in ``architectures`` of config.json."""
        return architectures(self.fields)

    def nested(self, section: str, key: str) -> object:
        """Return the field ``key`` of the object ``section`` in config.json; None if either is absent."""
        value: Any = self.fields.get(section)
        return value.get(key) if isinstance(value, dict) else None

    @classmethod
    def planned(cls, draft: Draft, target: TargetSpec) -> Self:
        """Return the folder that ``draft`` will export for ``target``, without tensors."""
        return cls(exported_config(draft, target), frozenset(), target)

    def first_of(self, flaws: Iterable[Flaw]) -> Flaw | None:
        """Return the first of the ``flaws`` that the folder has, or None."""
        return next((flaw for flaw in flaws if flaw.found(self)), None)


@dataclass(frozen=True)
class Flaw:
    """A property of a folder that one engine cannot serve."""

    problem: str
    """Clause for the error message: what is wrong, and what to write instead."""
    found: Callable[[ServedFolder], bool]


def check_served(engine: str, flaws: Iterable[Flaw], folder: Path, target: TargetSpec) -> None:
    """Raise ArtifactError, one line, for the first of the ``flaws`` that ``folder`` has."""
    fields = read_config(folder)
    if fields is None:
        raise ArtifactError(f"draft {folder} cannot be served by {engine}: it has no config.json")
    # A draft inside its target's folder has the target's files, which may be many.
    tensors = stored_tensors(folder) if folder.resolve() == target.folder.resolve() else read_shapes(folder)
    flaw = ServedFolder(fields, frozenset(tensors), target).first_of(flaws)
    if flaw is not None:
        raise ArtifactError(f"draft {folder} cannot be served by {engine}: {flaw.problem}")
