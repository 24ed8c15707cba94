"""Make a copy of a target in which a trained head replaces the target's own head."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError
from spec_draft_mtp.stored_head import head_places, head_shapes, read_head
from spec_kit.targets import copy_target

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_LENGTH_BYTES = 8
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stitch(target: Path, head: Path, output: Path) -> None:
    """Copy ``target`` to ``output``, a new folder, with the tensors of ``head`` in place of the target's own head.

    All other bytes of the copy equal the target's. Raise ArtifactError, before anything is written, if the two heads
    differ in the names, shapes or dtypes of their tensors, and TargetError if the folder cannot be copied. A head
    stores the constants of its router in float32; the copy has them in the target's dtype.
    """
    import torch

    if output.exists():
        raise ArtifactError(f"{output} exists; name a new folder")
    old, new = head_places(target), read_head(head)
    if not old:
        raise ArtifactError(
            f"target {target} has no MTP head that the trained one could replace; export the head alone"
        )
    shapes = head_shapes(target)
    others = {name: tuple(tensor.shape) for name, tensor in new.items()}
    dtypes = {name: getattr(torch, _DTYPES[at.dtype]) for name, (_, at) in old.items()}
    unlike = {name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name)} or {
        name
        for name, (place, _) in old.items()
        if new[place.name].dtype != dtypes[name] and not place.is_constant
    }
    if unlike:
        raise ArtifactError(
            f"the trained head does not fit into target {target}, whose own head has other names, shapes or dtypes, "
            f"such as of {min(unlike)}; export the head alone"
        )
    copy_target(target, output)
    for name, (place, at) in old.items():
        tensor = place.view(new[place.name]).to(dtypes[name])
        _overwrite(output / at.file.relative_to(target), name, tensor)


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
