"""Make a copy of a target in which a trained head replaces the target's own head."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError
from spec_draft_mtp.stored_head import read_head
from spec_kit.targets import stored_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_LENGTH_BYTES = 8


def stitch(target: Path, head: Path, output: Path) -> None:
    """Copy ``target`` to ``output``, a new folder, with the tensors of ``head`` in place of the target's own head.

    All other bytes of the copy equal the target's. Raise ArtifactError, before anything is written, if the two heads
    differ in the names, shapes or dtypes of their tensors.
    """
    if output.exists():
        raise ArtifactError(f"{output} exists; name a new folder")
    old, new = read_head(target), read_head(head)
    if not old:
        raise ArtifactError(
            f"target {target} has no MTP head that {head} could replace; export the head alone"
        )
    if _forms(old) != _forms(new):
        names = sorted(
            name for name in old.keys() | new.keys() if _forms(old).get(name) != _forms(new).get(name)
        )
        raise ArtifactError(f"{head} does not fit into {target}: {', '.join(names)} not alike in both")
    shutil.copytree(target, output, copy_function=shutil.copyfile)
    for name, at in stored_tensors(output).items():
        if name in new:
            _overwrite(at.file, name, new[name])


def _forms(head: dict[str, Tensor]) -> dict[str, object]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in head.items()}


def _overwrite(file: Path, name: str, tensor: Tensor) -> None:
    """Overwrite a tensor's bytes at the offset that the file's header states."""
    import torch

    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        first, stop = json.loads(stream.read(length))[name]["data_offsets"]
        assert stop - first == len(data)
        stream.seek(_LENGTH_BYTES + length + first)
        stream.write(data)
