"""Read an MTP head from the folder of a target or of an export, and name its tensors as the target does.

The module has one set of names, which are Qwen3.5's. DeepSeek V3 and GLM store the head as one more layer of the
target, with other names. Files store each expert by itself or all experts stacked, as the module has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError, TargetError
from spec_draft_mtp.expert_shapes import BIAS
from spec_draft_mtp.shape import LAYER
from spec_kit.targets import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_kit.drafting import Shapes
    from spec_kit.targets import StoredTensor

_HEAD = "mtp."
_FLOATS = ("F32", "BF16", "F16")
_OUTSIDE = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}
"""Name in a target's layer -> name in the module, for the parts outside the decoder layer."""
_COPIES = ("embed_tokens.", "shared_head.head.")
"""Copies of the target's embedding and output head, which engines do not use."""
_JOINER = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Place:
    """The place of a stored tensor in the module."""

    name: str
    """Name of the module's tensor."""
    expert: int | None = None
    """Index of the expert if the stored tensor is one expert's."""
    part: str = ""
    """The expert's layer: gate, up or down."""

    @property
    def is_constant(self) -> bool:
        """Whether training leaves the tensor as it is."""
        return self.name.endswith(BIAS)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the part of the module's tensor that is stored here; it shares memory with ``tensor``."""
        if self.expert is None:
            return tensor
        own = tensor[self.expert]
        return own if self.part == "down" else own.chunk(2)[self.part == "up"]


def head_places(folder: Path) -> dict[str, tuple[Place, StoredTensor]]:
    """Return the place and the file of each of the head's tensors, by its stored name.

    Raise ArtifactError if a tensor is quantised or a file is damaged.
    """
    try:
        stored = stored_tensors(folder)
    except TargetError as error:
        raise ArtifactError(str(error)) from error
    found: dict[str, tuple[Place, StoredTensor]] = {}
    for name, place in _placed(stored).items():
        at = stored[name]
        if at.dtype not in _FLOATS:
            raise ArtifactError(
                f"{at.file}: {name} has dtype {at.dtype}, expected {' or '.join(_FLOATS)}: a quantised head is not "
                "trained; convert the target to bfloat16 first"
            )
        found[name] = place, at
    return found


def head_shapes(folder: Path) -> Shapes:
    """Return the shapes of the module's tensors. Raise ArtifactError if the head is quantised or incomplete."""
    shapes: Shapes = {}
    experts: dict[str, dict[tuple[int, str], tuple[int, ...]]] = {}
    for place, at in head_places(folder).values():
        if place.expert is None:
            shapes[place.name] = at.shape
        else:
            experts.setdefault(place.name, {})[place.expert, place.part] = at.shape
    for name, parts in experts.items():
        shapes[name] = _stacked(folder, name, parts)
    return shapes


def is_whole_target(folder: Path) -> bool:
    """Return whether the folder also has tensors outside the head; an export has only the head's tensors."""
    stored = stored_tensors(folder)
    return len(_placed(stored)) < len(stored)


def read_head(folder: Path) -> dict[str, Tensor]:
    """Return the module's tensors with the dtypes of the files; an empty dict if the folder has no head."""
    import torch
    from safetensors import safe_open

    shapes = head_shapes(folder)
    loaded = dict[str, "Tensor"]()
    places = head_places(folder)
    for path in {at.file for _, at in places.values()}:
        with safe_open(path, framework="pt") as file:
            for name, (place, at) in places.items():
                if at.file != path:
                    continue
                tensor = file.get_tensor(name)
                if place.expert is None:
                    loaded[place.name] = tensor
                    continue
                if place.name not in loaded:
                    loaded[place.name] = torch.empty(shapes[place.name], dtype=tensor.dtype)
                place.view(loaded[place.name]).copy_(tensor)
    return loaded


def stored_parts(weights: Mapping[str, Tensor], layer: int | None) -> Iterator[tuple[str, Place]]:
    """Yield the stored name and the place of each tensor of a head, with each expert by itself.

    ``layer``: number of the target's layer as which the head is stored; None for Qwen's form.
    """
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".experts.")
        if not stem:
            yield _stored_name(name, layer), Place(name)
            continue
        parts = ("down",) if kind == "down_proj" else ("gate", "up")
        for expert in range(len(tensor)):
            for part in parts:
                stored = f"{stem}.experts.{expert}.{part}_proj.weight"
                yield _stored_name(stored, layer), Place(name, expert, part)


def _placed(stored: Mapping[str, StoredTensor]) -> dict[str, Place]:
    """Return the places of the head's tensors by stored name; copies of the target's tensors are left out."""
    joiner = next(filter(None, map(_JOINER.fullmatch, stored)), None)
    prefix = _HEAD if joiner is None else joiner[1]
    own = {name: name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
    if joiner is not None:
        own = {name: _module_name(rest) for name, rest in own.items() if not rest.startswith(_COPIES)}
    return {name: _place(_HEAD + rest) for name, rest in own.items()}


def _module_name(rest: str) -> str:
    stem, _, last = rest.rpartition(".")
    return f"{_OUTSIDE[stem]}.{last}" if stem in _OUTSIDE else f"{LAYER.removeprefix(_HEAD)}.{rest}"


def _stored_name(name: str, layer: int | None) -> str:
    if layer is None:
        return name
    inside = name.removeprefix(f"{LAYER}.")
    if inside == name:
        stem, _, last = name.removeprefix(_HEAD).rpartition(".")
        inside = f"{next(old for old, new in _OUTSIDE.items() if new == stem)}.{last}"
    return f"model.layers.{layer}.{inside}"


def _place(name: str) -> Place:
    if (found := _EXPERT.fullmatch(name)) is None:
        return Place(name)
    stacked = "down_proj" if found[3] == "down" else "gate_up_proj"
    return Place(f"{found[1]}.{stacked}", int(found[2]), found[3])


def _stacked(folder: Path, name: str, parts: Mapping[tuple[int, str], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of stacked experts. ``parts``: shape of each expert's layers in the files."""
    halves = ("down",) if name.endswith("down_proj") else ("gate", "up")
    number = 1 + max(expert for expert, _ in parts)
    wanted = {(expert, half) for expert in range(number) for half in halves}
    first, *others = set(parts.values())
    if others or parts.keys() != wanted or len(first) != 2:
        raise ArtifactError(f"draft {folder}: the experts of {name} are not complete, or differ in shape")
    return (number, len(halves) * first[0], first[1])
