"""Save named tensors, sharded or not, to a StateFolder, and load them on any other number of ranks.

A rank's shard of a tensor is one rectangle of the tensor, or a few rectangles that form a range of its elements
(``FlatShard``). ``rank-R.safetensors`` holds the rectangles that rank R wrote, under "name@offset". ``index.json``
lists each tensor's dtype and full shape, and the file of each rectangle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter
from torch import Tensor
from torch.distributed.tensor import DTensor

from spec_core import Config, StateFolder, foreign_errors
from spec_core.errors import ArtifactError

INDEX_FILE = "index.json"
_GENERATOR = "generator.rank-"
"""Prefix of the names under which each rank saves its generator's state, which is no shared tensor."""

Offset = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FlatShard:
    """A range of the flattened elements of a rectangle of a tensor: one rank's shard.

    Distributed optimizers shard tensors in this way.
    """

    shape: Offset
    """Shape of the full tensor."""
    offset: Offset
    """Index in the tensor of the rectangle's first element, one number per dimension."""
    part: Offset
    """Shape of the rectangle."""
    first: int
    """Index of the range's first element in the flattened (row-major) rectangle."""
    values: Tensor
    """The range's elements [n], contiguous; n = 0 if this rank holds none of the rectangle."""
    saves: bool
    """Whether this rank saves the range; other ranks may hold the same range."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.values.dtype

    def rectangles(self) -> Iterator[tuple[Tensor, Offset]]:
        """Split the range of the flattened tensor into the fewest boxes; yield each with its offset."""
        values = self.values.detach()
        for start, shape in _rectangles(self.first, self.first + len(values), self.part):
            rectangle, values = values.split([prod(shape), len(values) - prod(shape)])
            offset = tuple(map(sum, zip(self.offset, start, strict=True)))
            yield rectangle.view(shape), offset


_Sizes = tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]


class Part(Config):
    """A rectangle of a tensor, and the file that holds it."""

    offset: _Sizes
    shape: _Sizes
    file: Annotated[str, Field(pattern=r"^state/rank-\d+\.safetensors$")]

    @property
    def file_name(self) -> str:
        """The file's name in the state's folder."""
        return self.file.removeprefix("state/")


class IndexEntry(Config):
    """A tensor's dtype, full shape, and saved rectangles."""

    dtype: str
    shape: _Sizes
    parts: tuple[Part, ...]

    def check_whole(self) -> None:
        """Raise ValueError if torch does not have the dtype, or if the parts do not cover the tensor."""
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype!r} is no dtype")
        for part in self.parts:
            if {len(part.offset), len(part.shape)} != {len(self.shape)}:
                raise ValueError(
                    f"a part of shape {list(part.shape)} is none of a tensor of shape {list(self.shape)}"
                )
            axes = zip(part.offset, part.shape, self.shape, strict=True)
            if any(first + length > whole for first, length, whole in axes):
                raise ValueError(
                    f"a part of shape {list(part.shape)} lies outside of shape {list(self.shape)}"
                )
        rectangles = {(part.offset, part.shape) for part in self.parts}  # ranks may have saved the same one
        if sum(prod(shape) for _, shape in rectangles) != prod(self.shape):
            raise ValueError(f"its parts do not make a tensor of shape {list(self.shape)}")


Index = dict[str, IndexEntry]


def save_sharded(
    state: Mapping[str, Tensor | FlatShard], folder: StateFolder, group: dist.ProcessGroup
) -> None:
    """Write this rank's shards of ``state`` and random state; rank 0 also writes the index. Collective."""
    rank = dist.get_rank(group)
    file = f"rank-{rank}.safetensors"
    mine = {name: value for name, value in state.items() if _saves(value, rank)}
    mine[f"{_GENERATOR}{rank}"] = torch.get_rng_state()
    tensors: dict[str, Tensor] = {}
    entries: Index = {}
    for name, value in mine.items():
        parts: list[Part] = []
        for local, offset in _held(value):
            parts.append(Part(offset=offset, shape=tuple(local.shape), file=f"state/{file}"))
            tensors[_key(name, offset)] = local
        dtype = str(value.dtype).removeprefix("torch.")
        entries[name] = IndexEntry(dtype=dtype, shape=tuple(value.shape), parts=tuple(parts))
    folder.write_tensors(file, tensors)
    everyones: list[Index] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyones, entries, group=group)
    if rank == 0:
        folder.write_json(INDEX_FILE, _merged(everyones))


def load_sharded(
    state: Mapping[str, Tensor | FlatShard], folder: StateFolder, group: dist.ProcessGroup
) -> None:
    """Load tensors, saved by any number of ranks, into the tensors of ``state``.

    Also restore this rank's random state, if it was saved.
    """
    index = _read_index(folder)
    shared = {name: entry for name, entry in index.items() if not name.startswith(_GENERATOR)}
    check_names(state, shared)
    _read(state, index, folder)
    name = f"{_GENERATOR}{dist.get_rank(group)}"
    if name in index:
        torch.set_rng_state(_read_full(index, [name], folder)[name])


def read_full(folder: StateFolder, prefix: str = "") -> dict[str, Tensor]:
    """Return every full tensor whose name begins with ``prefix``, named without it; needs no process group."""
    index = _read_index(folder)
    found = _read_full(index, [name for name in index if name.startswith(prefix)], folder)
    return {name.removeprefix(prefix): value for name, value in found.items()}


def check_names(state: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Raise ArtifactError if checkpoint and draft differ in the names of their tensors."""
    if different := state.keys() ^ saved.keys():
        raise ArtifactError(f"checkpoint and draft differ in {', '.join(sorted(different))}")


def copy_overlap(
    target: Tensor | FlatShard, full_shape: Offset, source: Tensor, source_offset: Offset, name: str
) -> None:
    """Copy into ``target`` its common elements with ``source``, a rectangle of the same tensor.

    ``target``: the full tensor or a shard of it. ``source_offset``: position of the rectangle in the full
    tensor. Raise ArtifactError if ``full_shape``, the checkpoint's shape, is not the shape of ``target``.
    """
    if tuple(target.shape) != tuple(full_shape):
        raise ArtifactError(
            f"{name} has shape {list(full_shape)} in the checkpoint, {list(target.shape)} in the draft"
        )
    for local, offset in _held(target):
        _copy_common(local, offset, source, source_offset)


def _copy_common(local: Tensor, offset: Offset, source: Tensor, source_offset: Offset) -> None:
    """Copy the overlap of two rectangles of one tensor from ``source`` to ``local``."""
    for dimension, (mine, theirs) in enumerate(zip(offset, source_offset, strict=True)):
        start = max(mine, theirs)
        stop = min(mine + local.shape[dimension], theirs + source.shape[dimension])
        length = max(0, stop - start)
        local = local.narrow(dimension, start - mine if length else 0, length)
        source = source.narrow(dimension, start - theirs if length else 0, length)
    with torch.no_grad():
        local.copy_(source)


def _read_full(index: Index, names: list[str], folder: StateFolder) -> dict[str, Tensor]:
    state = {name: torch.zeros(index[name].shape, dtype=getattr(torch, index[name].dtype)) for name in names}
    _read(state, index, folder)
    return state


def _read(state: Mapping[str, Tensor | FlatShard], index: Index, folder: StateFolder) -> None:
    by_file: dict[str, list[tuple[str, Part]]] = {}
    for name in state:
        for part in index[name].parts:
            by_file.setdefault(part.file_name, []).append((name, part))
    for file, parts in by_file.items():
        with folder.open_tensors(file) as tensors:
            for name, part in parts:
                with foreign_errors(ArtifactError, f"{folder.path / file} cannot be read"):
                    source = tensors.get_tensor(_key(name, part.offset))
                _check_as_listed(source, index[name].dtype, part, f"{folder.path / file}: {name}")
                copy_overlap(state[name], index[name].shape, source, part.offset, name)


def _check_as_listed(source: Tensor, dtype: str, part: Part, where: str) -> None:
    found = (source.dtype, tuple(source.shape))
    listed = (getattr(torch, dtype), part.shape)
    if found != listed:
        raise ArtifactError(
            f"{where} has {found[0]} {list(found[1])}, {INDEX_FILE} says {listed[0]} {list(listed[1])}"
        )


def _read_index(folder: StateFolder) -> Index:
    content = folder.read_json(INDEX_FILE)
    with foreign_errors(ArtifactError, f"{folder.path / INDEX_FILE} is damaged"):
        index = TypeAdapter(Index).validate_python(content, strict=False)
        for entry in index.values():
            entry.check_whole()
        return index


def _merged(everyones: list[Index]) -> dict[str, object]:
    """Merge the indices of all ranks; return the result as a JSON-serializable dict."""
    merged: Index = {}
    for entries in everyones:
        for name, entry in entries.items():
            known = merged.get(name, entry.model_copy(update={"parts": ()}))
            merged[name] = known.model_copy(update={"parts": known.parts + entry.parts})
    return {name: entry.model_dump(mode="json") for name, entry in merged.items()}


def _saves(value: Tensor | FlatShard, rank: int) -> bool:
    """Return whether this rank saves its shard of ``value``; other ranks may hold the same shard.

    A tensor that is not sharded is the same on all ranks. A shard is the same along each mesh axis that
    replicates it.
    """
    if isinstance(value, FlatShard):
        return value.saves
    if not isinstance(value, DTensor):
        return rank == 0
    coordinate = value.device_mesh.get_coordinate() or ()
    axes = zip(coordinate, value.placements, strict=True)
    return all(number == 0 for number, placement in axes if placement.is_replicate())


def _held(value: Tensor | FlatShard) -> Iterator[tuple[Tensor, Offset]]:
    """Yield the rectangles of a tensor that this rank holds, each with its offset in the tensor."""
    if isinstance(value, FlatShard):
        yield from value.rectangles()
        return
    tensor = value.detach()
    if not isinstance(tensor, DTensor):
        yield tensor, (0,) * tensor.ndim
        return
    (chunk,) = tensor.__create_chunk_list__()
    yield tensor.to_local(), tuple(chunk.offsets)


def _rectangles(first: int, stop: int, shape: Offset) -> Iterator[tuple[Offset, Offset]]:
    """Divide the elements ``first`` to ``stop`` − 1 of a flattened tensor into rectangular blocks.

    ``shape``: the tensor's shape. Yield offset and shape of each block in the tensor; the blocks are as few as
    possible.
    """
    if first >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    inside = first // row
    whole = -(-first // row)
    last = stop // row
    if inside < whole:  # the range begins, or lies, inside a row
        end = min(stop, whole * row)
        for offset, part in _rectangles(first - inside * row, end - inside * row, shape[1:]):
            yield (inside, *offset), (1, *part)
    if whole < last:
        yield (whole, *(0 for _ in shape[1:])), (last - whole, *shape[1:])
    if whole <= last:
        for offset, part in _rectangles(0, stop - last * row, shape[1:]):
            yield (last, *offset), (1, *part)


def _key(name: str, offset: Offset) -> str:
    return f"{name}@{','.join(map(str, offset))}"
