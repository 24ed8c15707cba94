"""A TargetType describes how one type of target computes embeddings, final norm, logits and positions.

The model's config.json has the type's name, but not these computations. ``spec_kit.targets`` has a table of types.
A distribution can add types as entry points of the group ``spec_core.target_types``. The name of an entry point is
the ``model_type``. Its object is a TargetType. If the model has a text model under ``text_config``, its object is
instead the ``model_type`` of the text model, a string.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Protocol

import pydantic
from pydantic.dataclasses import dataclass

from spec_core.errors import PluginInvalid
from spec_core.foreign import foreign_errors
from spec_core.target import NormKind


class TargetValues(Protocol):
    """The values of a target's config.json; values in ``text_config`` take precedence.

    A missing value is replaced by transformers' default for this type, or else by ``default``. The methods raise
    TargetError if there is no default either, or if a value has the wrong type.
    """

    def get(self, *names: str) -> Any:
        """Return the value of the first name in ``names`` that is present and not null, or None."""

    def is_null(self, name: str) -> bool:
        """Return whether ``name`` is present with the value null."""
        ...

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the positive integer that the first present key of ``names`` has, else ``default``."""
        ...

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the finite number that the first present key of ``names`` has, else ``default``."""
        ...

    def positive(self, *names: str, default: float | None = None) -> float:
        """Return the value, greater than 0, of the first of ``names`` that is present, else ``default``."""
        ...

    def flag(self, name: str) -> bool:
        """Return the boolean called ``name``; False if it is absent."""
        ...


Scale = Callable[[TargetValues], float]
Cap = Callable[[TargetValues], float | None]
_Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


def one(values: TargetValues) -> float:
    """Return the scale 1: no scaling."""
    return 1.0


def no_cap(values: TargetValues) -> None:
    """Return None: logits are not capped."""


@dataclass(frozen=True, kw_only=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))
class TargetType:
    """Describes how one type of target computes embeddings, final norm, logits and positions."""

    norm: NormKind = "rms"
    eps: str = "rms_norm_eps"
    """Key of config.json that holds the final norm's epsilon."""
    norm_tensor: str | None = None
    """Name of the final norm's weight beside the embedding, such as "final_norm.weight". None means one of the usual
    names, such as "norm.weight"."""
    embedding_scale: Scale = one
    """Computes from config.json the factor on the embedding."""
    logit_scale: Scale = one
    """Computes from config.json the factor on the head's output."""
    logit_softcap: Cap = no_cap
    """Computes from config.json the cap of the logits: x becomes cap · tanh(x / cap). None means no cap."""
    theta: _Positive | None = 10_000.0
    """Base of the rotary frequencies if config.json has none. None if the model has no rotary positions."""
    partial: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    """Share of a head's channels that are rotated, if config.json does not say it. None means all channels."""
    needs_rope: bool = False
    """Whether config.json must have rope_parameters (or rope_scaling) and rope_theta, because the type's
    default is not a plain rotation with base ``theta``."""
    image_token: str | None = None
    """Key of config.json that has the id of the placeholder token for each embedding of an image. None if no images
    are given to targets of this type."""
    image_ends: tuple[str, str] | None = None
    """Keys of config.json that have the ids of the tokens before and behind an image, if the target's
    image processor inserts them. None if the chat template inserts them, or if there are no such tokens."""
    may_be_flat: bool = False
    """Whether older config.json files have the values of this text model at the top level, without
    ``text_config``."""

    def guarded(self, owner: str) -> TargetType:
        """Return a copy whose functions raise PluginInvalid, naming the plugin ``owner``, for any error."""
        changes = {
            name: _guarded(getattr(self, name), kind, f"{owner}: its {name} fails") for name, kind in _RESULTS
        }
        return replace(self, **changes)


_RESULTS: tuple[tuple[str, pydantic.TypeAdapter[Any]], ...] = (
    ("embedding_scale", pydantic.TypeAdapter(_Number)),
    ("logit_scale", pydantic.TypeAdapter(_Number)),
    ("logit_softcap", pydantic.TypeAdapter(_Positive | None)),
)


def _guarded(compute: Scale | Cap, kind: pydantic.TypeAdapter[Any], what: str) -> Callable[..., Any]:
    def call(values: TargetValues) -> Any:
        with foreign_errors(PluginInvalid, what):
            return kind.validate_python(compute(values), strict=True)

    return call
