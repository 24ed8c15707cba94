"""A check for NaN: a draft that diverged still decodes, and would be measured without a warning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError
from spec_core.foreign import foreign_errors

if TYPE_CHECKING:
    from pathlib import Path


def check_finite(folder: Path) -> None:
    """Raise ArtifactError if a tensor of the draft holds NaN or infinity."""
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with (
            foreign_errors(ArtifactError, f"draft tensors {path} cannot be read"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if not torch.isfinite(file.get_tensor(name)).all():
                    raise ArtifactError(
                        f"draft {folder}: {name} holds values that are not finite (NaN or infinity): its training "
                        "diverged or the file was damaged; export an earlier checkpoint"
                    )
