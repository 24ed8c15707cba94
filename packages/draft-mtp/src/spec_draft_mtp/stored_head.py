"""Read the MTP head's tensors (``mtp.*``) from the folder of a target or of an export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError, TargetError
from spec_kit.targets import stored_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from spec_kit.drafting import Shapes

_PREFIX = "mtp."
_FLOATS = ("F32", "BF16", "F16")


def head_shapes(folder: Path) -> Shapes:
    """Return the shapes of the head's tensors. Raise ArtifactError if the head is quantised or a file is damaged."""
    try:
        found = {name: at for name, at in stored_tensors(folder).items() if name.startswith(_PREFIX)}
    except TargetError as error:
        raise ArtifactError(str(error)) from error
    for name, at in found.items():
        if at.dtype not in _FLOATS:
            raise ArtifactError(f"{at.file}: {name} has dtype {at.dtype}, expected {' or '.join(_FLOATS)}")
    return {name: at.shape for name, at in found.items()}


def is_whole_target(folder: Path) -> bool:
    """Return whether the folder also has tensors outside the head; an export has only the head's tensors."""
    return not all(name.startswith(_PREFIX) for name in stored_tensors(folder))


def read_head(folder: Path) -> dict[str, Tensor]:
    """Return the head's tensors as stored; an empty dict if the folder has none."""
    from safetensors import safe_open

    loaded: dict[str, Tensor] = {}
    for name, at in stored_tensors(folder).items():
        if name.startswith(_PREFIX):
            with safe_open(at.file, framework="pt") as file:
                loaded[name] = file.get_tensor(name)
    return loaded
