"""Define the shape of a draft, and read and write it in a served config.json.

Importing this module imports no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pydantic
from pydantic import Field

from spec_core import TargetSpec
from spec_core.wording import shown
from spec_kit.drafting.draft_files import (
    Json,
    Shapes,
    Size,
    checked,
    config_error,
    present,
    section,
    served_dtype,
)

_Ids = tuple[Annotated[int, Field(ge=0)], ...]


class DraftShape(pydantic.BaseModel):
    """All sizes and settings that determine a draft's tensors and arithmetic.

    A field's alias is its key in a served config.json. Drafts add fields of their own in a subclass.
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    nested: ClassVar[str] = ""
    """Key of the object in config.json that holds the fields specific to this kind of draft."""

    hidden_size: Size
    """Width H, the same as the target's."""
    target_vocab_size: Size = Field(alias="vocab_size")
    """Size of the target's vocabulary."""

    @classmethod
    def for_target(cls, config: Any, target: TargetSpec, **own: object) -> Self:
        """Return a fresh draft's shape, with sizes of the target.

        ``own``: further fields, and fields that replace the target's. ``config``: the draft's options, for
        subclasses.
        """
        sizes = {"hidden_size": target.hidden_size, "target_vocab_size": target.vocab_size}
        return cls.model_validate({**sizes, **own}, by_name=True, by_alias=False)

    @classmethod
    def from_json(cls, fields: Json, folder: Path) -> Self:
        """Return the shape that a served config.json describes; a null field counts as absent.

        Raises ArtifactError if no draft of this kind can have that shape.
        """
        fields = present(fields)
        own = section(fields, cls.nested, folder) if cls.nested else {}
        required = {info.alias or name: None for name, info in cls.model_fields.items() if info.is_required()}
        shape: Self = checked(cls, required | fields | cls.read_own(fields, own, folder), folder)
        if problem := shape.problem() or shape._contradiction(fields, own):
            raise config_error(folder, problem)
        return shape

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return fields that config.json may store under other keys or in another form, by alias (usual key).

        ``own``: the object in config.json with the fields specific to this kind of draft (``nested``).
        """
        return {}

    @abstractmethod
    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json in the order in which they are written."""

    @abstractmethod
    def tensor_shapes(self) -> Shapes:
        """Return the shape of every trained tensor, by its name in the module and in the exported file."""

    def mapping_shapes(self) -> tuple[Shapes, Shapes]:
        """Return the shapes of tensors that are not trained, in two mappings: required and optional ones."""
        return {}, {}

    @property
    def reduced(self) -> bool:
        """Whether the draft's vocabulary is smaller than the target's."""
        return False

    def fixed_fields(self) -> Json:
        """Return fields of a served config.json for which training supports only the given value."""
        return {}

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        return None

    def size_problem(self, target: TargetSpec) -> str | None:
        """Return which size of this shape differs from the target's, as an error message, or None."""
        for what, own, theirs in (
            ("hidden size", self.hidden_size, target.hidden_size),
            ("vocabulary size", self.target_vocab_size, target.vocab_size),
        ):
            if own != theirs:
                return f"it was made for {what} {own}, this target has {theirs}"
        return None

    def _contradiction(self, fields: Json, own: Json) -> str | None:
        for key, value in self.fixed_fields().items():
            for found in (fields.get(key), own.get(key)):
                if found not in (None, value):
                    wanted = "no such field" if value is None else shown(value)
                    return f"{key}={shown(found)}: expected {wanted} for a draft of this kind and shape"
        return None


def head_fields(architecture: str, model_type: str, target: TargetSpec) -> Json:
    """Return the fields with which an exported config.json begins."""
    dtype = served_dtype(target)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": target.vocab_size,
    }


def read_layers(
    entering: tuple[Json, str], outputs: tuple[Json, str], folder: Path
) -> tuple[int, ...] | None:
    """Return the captured layers that a config.json names, or None if it names none.

    Engines use two lists: id k in ``entering`` means the input of layer k, and id k in ``outputs`` means the
    output of layer k. Each argument is the object that holds the list, and the list's key. An empty list counts
    as absent.
    """
    found = [
        tuple(layer + shift for layer in checked(_Ids, fields.get(key) or [], folder, key))
        for (fields, key), shift in ((entering, 0), (outputs, 1))
    ]
    layers, *others = [ids for ids in found if ids] or [None]
    if others not in ([], [layers]):
        raise config_error(
            folder,
            f"{entering[1]} {list(found[0])}, and {outputs[1]} that counts outputs, "
            f"{[layer - 1 for layer in found[1]]}, do not name the same layers",
        )
    if layers is not None and list(layers) != sorted(set(layers)):
        raise config_error(folder, f"captured layers {list(layers)} must be unique and ascending")
    return layers


def layer_range_problem(layers: Sequence[int], target: TargetSpec) -> str | None:
    """Return why engines cannot capture these layers, or None.

    For N layers of the target, ids must be 1 to N − 1. Some engines' lists name the input of layer k by the layer
    before it, k − 1, so the input of layer 0 has no name there. Not every engine can capture the last layer's
    output, which would be id N.
    """
    if layers[0] >= 1 and layers[-1] < target.num_layers:
        return None
    return f"layers {list(layers)} must lie between 1 and {target.num_layers - 1}"
