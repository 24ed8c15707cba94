"""The sizes of a draft made of Llama-style decoder layers, and their form in a served config.json.

Torch is not needed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import pydantic
from pydantic import Field

from spec_core.config import DraftConfig
from spec_core.drafting.draft_files import Json, Size, checked, config_error, present, section, served_dtype
from spec_core.targets.rope_parameters import read_rope, rope_fields, rope_problem
from spec_core.wording import shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spec_core.drafting.draft_files import Shapes
    from spec_core.target import TargetSpec


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{list(layers)} must be unique and ascending, as both engines capture them")
    return layers


CapturedLayers = Annotated[tuple[int, ...], pydantic.AfterValidator(_ascending)]
"""Ids of the captured residual streams, as an option of a draft."""
_Ids = tuple[Annotated[int, Field(ge=0)], ...]


class DecoderConfig(DraftConfig):
    """Options of a draft that is made of decoder layers: sizes that may differ from the target's."""

    intermediate_size: int | None = Field(None, ge=1)
    """Width of the draft's MLP. None, here and for the heads: the target's."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads of the draft's attention."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key-value heads of the draft's attention."""
    head_dim: int | None = Field(None, ge=2)
    """Channels of one head."""


class DecoderShape(pydantic.BaseModel):
    """Everything that fixes a draft's tensors and arithmetic.

    A field's alias is its key in a served config.json. Drafts add fields of their own in a subclass.
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    nested: ClassVar[str] = ""
    """Key of the object of config.json that holds what only this kind of draft has."""

    hidden_size: Size
    """Width H, which is the target's."""
    target_vocab_size: Size = Field(alias="vocab_size")
    intermediate_size: Size
    num_heads: Size = Field(alias="num_attention_heads")
    num_kv_heads: Size = Field(default_factory=lambda sizes: sizes["num_heads"], alias="num_key_value_heads")
    head_dim: Size = Field(default_factory=lambda sizes: sizes["hidden_size"] // sizes["num_heads"])
    norm_eps: float = Field(1e-6, gt=0, alias="rms_norm_eps")
    rope: Json
    """Hugging Face ``rope_parameters``."""
    max_positions: Size = Field(2048, alias="max_position_embeddings")

    @classmethod
    def for_target(cls, config: DecoderConfig, target: TargetSpec, **own: object) -> Self:
        """Return a fresh draft's shape: the fields ``own``, else the options, else the target's sizes."""
        sizes: dict[str, object] = {
            "hidden_size": target.hidden_size,
            "target_vocab_size": target.vocab_size,
            "intermediate_size": config.intermediate_size or target.intermediate_size,
            "num_heads": config.num_heads or target.num_heads,
            "num_kv_heads": config.num_kv_heads or target.num_kv_heads,
            "head_dim": config.head_dim or target.head_dim,
            "norm_eps": target.norm_eps,
            "rope": dict(target.rope),
            "max_positions": target.max_positions,
        }
        return cls.model_validate({**sizes, **own}, by_name=True, by_alias=False)

    @classmethod
    def from_json(cls, fields: Json, folder: Path) -> Self:
        """Return the shape that a served config.json describes; null counts as absent.

        Raises ArtifactError where no draft of this kind can have it.
        """
        fields = present(fields)
        own = section(fields, cls.nested, folder) if cls.nested else {}
        for key in ("rope_parameters", "rope_scaling"):
            section(fields, key, folder)
        required = {info.alias or name: None for name, info in cls.model_fields.items() if info.is_required()}
        values = required | fields | {"rope": read_rope(fields)} | cls.read_own(fields, own, folder)
        shape: Self = checked(cls, values, folder)
        if problem := shape.problem() or shape._contradiction(fields, own):
            raise config_error(folder, problem)
        return shape

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return values, by alias, that config.json has elsewhere or in another form. ``own``: its nested object."""
        return {}

    @abstractmethod
    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json, in the order in which they are written."""

    @abstractmethod
    def tensor_shapes(self) -> Shapes:
        """Return every trained tensor under its name in the module and in the exported file."""

    def mapping_shapes(self) -> tuple[Shapes, Shapes]:
        """Return tensors that are not trained: those that a folder must hold, and those that it may hold."""
        return {}, {}

    def fixed_fields(self) -> Json:
        """Return fields that a served config.json may have with one value only: the one that is trained here."""
        return {}

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads are no multiple of {self.num_kv_heads} key-value heads"
        return rope_problem(self.rope, self.head_dim)

    def size_problem(self, target: TargetSpec) -> str | None:
        """Return which size of the target a draft of this shape was not made for, or None."""
        return next(
            (
                f"it was made for {what} {own}, this target has {theirs}"
                for what, own, theirs in (
                    ("hidden size", self.hidden_size, target.hidden_size),
                    ("vocabulary size", self.target_vocab_size, target.vocab_size),
                )
                if own != theirs
            ),
            None,
        )

    def _contradiction(self, fields: Json, own: Json) -> str | None:
        for key, value in self.fixed_fields().items():
            for found in (fields.get(key), own.get(key)):
                if found not in (None, value):
                    wanted = "nothing" if value is None else shown(value)
                    return f"{key}={shown(found)}: a draft of this kind and shape has {wanted} there"
        return None


def head_fields(architecture: str, model_type: str, target: TargetSpec) -> Json:
    """Return the fields that config.json begins with."""
    dtype = served_dtype(target)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": target.vocab_size,
    }


def decoder_fields(shape: DecoderShape) -> Json:
    """Return the fields of config.json that describe a decoder layer."""
    return {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
    }


def end_fields(shape: DecoderShape, target: TargetSpec) -> Json:
    """Return the fields of config.json for end tokens (a number, a list, or absent) and rotary embeddings."""
    ends = list(target.eos_token_ids)
    return {
        **({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}),
        **rope_fields(shape.rope),
    }


def read_layers(
    entering: tuple[Json, str], outputs: tuple[Json, str], folder: Path
) -> tuple[int, ...] | None:
    """Return the captured layers that a config.json names, or None where it names none.

    Engines have two lists, each given here as the object that holds it and its key: streams *entering* layer k, and
    *outputs* of layer k − 1. An empty list counts as absent.
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
    """Return why no engine captures these layers, or None.

    Ids run from 1 to N − 1: engines count some lists from the layer before, and cannot all tap the last one.
    """
    if layers[0] >= 1 and layers[-1] < target.num_layers:
        return None
    return f"layers {list(layers)} must lie between 1 and {target.num_layers - 1}"
