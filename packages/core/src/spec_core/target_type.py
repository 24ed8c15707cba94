"""TargetType: how the model code of one type of target treats embedding, final norm, logits and positions.

A config.json names its model's type and says none of this. ``spec_kit.targets`` has a table of types. A distribution
adds others as entry points of the group ``spec_core.target_types``, each called like the ``model_type``. An entry
point gives a TargetType or, for a model with a text model under ``text_config``, the type of that text model.
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
    """The values of a target's config.json; those of a ``text_config`` lie over the others.

    A value that is missing is the one that transformers takes for this type; ``default`` is taken where it has none
    either. TargetError for a value that is missing or of another kind.
    """

    def get(self, *names: str) -> Any:
        """Return the value of the first name that is there and not null, or None."""

    def is_null(self, name: str) -> bool:
        """Return whether a name is there with the value null."""
        ...

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer under one of ``names``."""
        ...

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number under one of ``names``."""
        ...

    def positive(self, *names: str, default: float | None = None) -> float:
        """Return a number above 0 under one of ``names``."""
        ...

    def flag(self, name: str) -> bool:
        """Return a boolean, false where it is absent."""
        ...


Scale = Callable[[TargetValues], float]
Cap = Callable[[TargetValues], float | None]
_Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


def one(values: TargetValues) -> float:
    """Scale by 1."""
    return 1.0


def no_cap(values: TargetValues) -> None:
    """Cap nothing."""


@dataclass(frozen=True, kw_only=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))
class TargetType:
    """The treatment of embedding, final norm, logits and positions by the model code of one type."""

    norm: NormKind = "rms"
    eps: str = "rms_norm_eps"
    """Key of config.json that holds the final norm's epsilon."""
    embedding_scale: Scale = one
    """Factor on the embedding, computed from config.json."""
    logit_scale: Scale = one
    """Factor on the head's output."""
    logit_softcap: Cap = no_cap
    """Cap of the logits: x becomes cap · tanh(x / cap). None: no cap."""
    theta: _Positive | None = 10_000.0
    """Base of the rotary frequencies where config.json names none. None: positions are not rotary."""
    partial: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    """Share of a head's channels that turn, where config.json does not say it. None: all."""
    needs_rope: bool = False
    """Whether config.json must hold rope_parameters (or rope_scaling) and rope_theta: the type's own default is no
    plain rotation by ``theta``."""

    def guarded(self, owner: str) -> TargetType:
        """Return a copy for a plugin's type: an error in its functions is a PluginInvalid that names ``owner``."""
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
