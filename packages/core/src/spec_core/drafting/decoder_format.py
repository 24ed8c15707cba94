"""What the served formats of Llama-style drafts have in common: options, fields of config.json, names of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Protocol

import pydantic

from spec_core.errors import ArtifactError
from spec_core.targets.rope_parameters import read_rope, rope_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from spec_core.drafting.served_draft import ConfigReader, Json


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{list(layers)} must be unique and ascending, as both engines capture them")
    return layers


CapturedLayers = Annotated[tuple[int, ...], pydantic.AfterValidator(_ascending)]
"""Ids of the captured residual streams, as an option of a draft."""


class DecoderShape(Protocol):
    """The sizes that every Llama-style decoder layer has."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def rope(self) -> Mapping[str, Any]: ...


def decoder_fields(shape: DecoderShape) -> Json:
    """Return the fields of config.json that describe a decoder layer, in the order in which they are written."""
    return {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
    }


def decoder_problem(shape: DecoderShape) -> str | None:
    """Return why no decoder layer can have this shape, or None."""
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} attention heads are no multiple of {shape.num_kv_heads} key-value heads"
    return rope_problem(shape.rope, shape.head_dim)


def read_rope_fields(reader: ConfigReader) -> Json:
    """Return the ``rope_parameters`` of a served config.json, in whichever form it has them."""
    for key in ("rope_parameters", "rope_scaling"):
        reader.section(key)
    return read_rope(reader.fields)


def canonical_names(stored: Iterable[str], folder: Path, canonical: Callable[[str], str]) -> dict[str, str]:
    """Return name in the module -> name in the file; ArtifactError where two files' names mean one tensor."""
    names: dict[str, str] = {}
    for name in stored:
        other = names.setdefault(canonical(name), name)
        if other != name:
            raise ArtifactError(f"draft {folder}: {other} and {name} are the same tensor, stored twice")
    return names
