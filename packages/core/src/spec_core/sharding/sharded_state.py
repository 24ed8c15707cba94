"""Named tensors, sharded or not, in a StateFolder: saved by any number of processes, loaded by any other number.

``rank-R.safetensors`` holds the parts that rank R wrote, under "name@offset"; ``index.json`` lists, for each tensor,
its dtype, its full shape, and which part of it is in which file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter
from torch.distributed.tensor import DTensor

from spec_core.config import Config
from spec_core.errors import ArtifactError
from spec_core.foreign import foreign_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from spec_core.state_folder import StateFolder

INDEX_FILE = "index.json"
_GENERATOR = "generator.rank-"
"""Each process's own tensors begin with this name: not part of what the ranks hold together."""

Offset = tuple[int, ...]


class Part(Config):
    """A rectangle of a tensor, and the file that holds it."""

    offset: Offset
    shape: Offset
    file: Annotated[str, Field(pattern=r"^state/rank-\d+\.safetensors$")]

    @property
    def file_name(self) -> str:
        """The file's name in the state's folder."""
        return self.file.removeprefix("state/")


class IndexEntry(Config):
    """A tensor's dtype, full shape and parts."""

    dtype: str
    shape: Offset
    parts: tuple[Part, ...]


Index = dict[str, IndexEntry]


def save_sharded(state: Mapping[str, Tensor], folder: StateFolder, group: dist.ProcessGroup) -> None:
    """Write the shards of ``state`` that this rank holds, and its generator; rank 0 adds the index. Collective."""
    rank = dist.get_rank(group)
    file = f"rank-{rank}.safetensors"
    mine = {name: value for name, value in state.items() if _is_first_copy(value, rank)}
    mine[f"{_GENERATOR}{rank}"] = torch.get_rng_state()
    tensors: dict[str, Tensor] = {}
    entries: Index = {}
    for name, value in mine.items():
        local, offset = _local(value)
        part = Part(offset=offset, shape=tuple(local.shape), file=f"state/{file}")
        dtype = str(value.dtype).removeprefix("torch.")
        entries[name] = IndexEntry(dtype=dtype, shape=tuple(value.shape), parts=(part,))
        tensors[_key(name, offset)] = local
    folder.write_tensors(file, tensors)
    everyones: list[Index] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyones, entries, group=group)
    if rank == 0:
        folder.write_json(INDEX_FILE, _merged(everyones))


def load_sharded(state: Mapping[str, Tensor], folder: StateFolder, group: dist.ProcessGroup) -> None:
    """Read into the tensors of ``state`` what any number of ranks saved, and this rank's generator if it has one."""
    index = _read_index(folder)
    shared = {name: entry for name, entry in index.items() if not name.startswith(_GENERATOR)}
    check_names(state, shared)
    _read(state, index, folder)
    name = f"{_GENERATOR}{dist.get_rank(group)}"
    if name in index:
        torch.set_rng_state(_read_full(index, [name], folder)[name])


def read_full(folder: StateFolder, prefix: str = "") -> dict[str, Tensor]:
    """Return every full tensor whose name begins with ``prefix``, in one process without any group."""
    index = _read_index(folder)
    return _read_full(index, [name for name in index if name.startswith(prefix)], folder)


def check_names(state: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Raise ArtifactError where the checkpoint has other tensors than the draft."""
    if different := state.keys() ^ saved.keys():
        raise ArtifactError(f"checkpoint and draft differ in {', '.join(sorted(different))}")


def copy_overlap(
    target: Tensor, full_shape: Offset, source: Tensor, source_offset: Offset, name: str
) -> None:
    """Copy the rectangle that ``target`` (a tensor or the shard of one) and ``source`` have in common."""
    if tuple(target.shape) != tuple(full_shape):
        raise ArtifactError(
            f"{name} has shape {list(full_shape)} in the checkpoint, {list(target.shape)} in the draft"
        )
    local, offset = _local(target)
    for dimension, (mine, theirs) in enumerate(zip(offset, source_offset, strict=True)):
        start = max(mine, theirs)
        stop = min(mine + local.shape[dimension], theirs + source.shape[dimension])
        length = max(0, stop - start)
        local = local.narrow(dimension, start - mine if length else 0, length)
        source = source.narrow(dimension, start - theirs if length else 0, length)
    with torch.no_grad():
        local.copy_(source)


def _read_full(index: Index, names: list[str], folder: StateFolder) -> dict[str, Tensor]:
    state = {name: torch.empty(index[name].shape, dtype=getattr(torch, index[name].dtype)) for name in names}
    _read(state, index, folder)
    return state


def _read(state: Mapping[str, Tensor], index: Index, folder: StateFolder) -> None:
    by_file: dict[str, list[tuple[str, Part]]] = {}
    for name in state:
        for part in index[name].parts:
            by_file.setdefault(part.file_name, []).append((name, part))
    for file, parts in by_file.items():
        with folder.open_tensors(file) as tensors:
            for name, part in parts:
                with foreign_errors(ArtifactError, f"{folder.path / file} cannot be read"):
                    source = tensors.get_tensor(_key(name, part.offset))
                copy_overlap(state[name], index[name].shape, source, part.offset, name)


def _read_index(folder: StateFolder) -> Index:
    content = folder.read_json(INDEX_FILE)
    with foreign_errors(ArtifactError, f"{folder.path / INDEX_FILE} is damaged"):
        return TypeAdapter(Index).validate_python(content, strict=False)


def _merged(everyones: list[Index]) -> dict[str, object]:
    """Return the index of all ranks' parts, as JSON."""
    merged: Index = {}
    for entries in everyones:
        for name, entry in entries.items():
            known = merged.get(name, entry.model_copy(update={"parts": ()}))
            merged[name] = known.model_copy(update={"parts": known.parts + entry.parts})
    return {name: entry.model_dump(mode="json") for name, entry in merged.items()}


def _is_first_copy(tensor: Tensor, rank: int) -> bool:
    """Return whether this rank is the one to write what it holds: others may hold the same.

    What is not sharded is the same everywhere, and so is a shard along each axis of the mesh that replicates it.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate() or ()
    axes = zip(place, tensor.placements, strict=True)
    return all(number == 0 for number, placement in axes if placement.is_replicate())


def _local(tensor: Tensor) -> tuple[Tensor, Offset]:
    """Return what this rank holds of a tensor, and where it begins."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.to_local(), tuple(chunk.offsets)


def _key(name: str, offset: Offset) -> str:
    return f"{name}@{','.join(map(str, offset))}"
