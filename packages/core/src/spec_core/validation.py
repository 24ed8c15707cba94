"""Validate a section of the configuration, and describe its first problem in one line.

The line names the key and the remedy.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

import pydantic

from spec_core.config import Config
from spec_core.errors import ConfigError
from spec_core.foreign import foreign_errors
from spec_core.wording import shown

C = TypeVar("C", bound=Config)


def validate(model: type[C], values: Mapping[str, Any], source: str) -> C:
    """Check ``values`` against ``model``; the first problem becomes a one-line ConfigError."""
    with foreign_errors(ConfigError, source):
        for key, number in _integers(values):
            if abs(number) >= 1 << 63:  # too large for any option; it overflows in divisions
                raise ConfigError(
                    f"{source}: {shown(key)[1:-1]}={shown(number)}: expected an integer of 63 bits"
                )
        # JSON mode is strict where YAML has the type, and still takes "a/b" for a path and [1] for a tuple.
        text = json.dumps(values, default=str)
    try:
        return model.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(model, error)}") from None


def _integers(value: object, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield the dotted key and the value of every integer within ``value``, a nested mapping or sequence."""
    if isinstance(value, int):
        yield key, value
    elif isinstance(value, dict):
        for name, part in cast("dict[Any, Any]", value).items():
            yield from _integers(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from _integers(part, key)


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return `` (did you mean 'x'?)`` or, if no known word is similar, the list of known words."""
    close = difflib.get_close_matches(word, known, cutoff=0.6)
    if not close:
        return f" (known: {', '.join(sorted(known))})"
    # If two known words are equally similar, prefer the one with the same first letter.
    likeness = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in close}
    best = max(close, key=lambda name: (likeness[name], name[:1] == word[:1]))
    return f" (did you mean {best!r}?)"


def _explain(model: type[Config], error: pydantic.ValidationError) -> str:
    # Report an unknown key first: if a key is misspelt, the right key is missing, too.
    problem = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in problem["loc"] if isinstance(part, str)]
    key = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "extra_forbidden":
        kind = "section or key" if len(path) == 1 else "key"
        homes = _sections_with(model, path[0]) if len(path) == 1 else []
        hint = f" (did you mean {' or '.join(homes)}?)" if homes else ""
        return f"unknown {kind} {shown(key)}" + (hint or suggestion(path[-1], _section_keys(model, path)))
    if problem["type"] == "missing":
        inner = next(iter(_section_keys(model, [*path, ""])), "")  # the first key, if a section is missing
        key = f"{key}.{inner}" if inner else key
        example = f", such as {key}=VALUE" if len(path) == len(problem["loc"]) else ""
        return f"{key} is required{example}"
    if problem["type"] == "model_type":
        first = next(iter(_section_keys(model, [*path, ""])), "key")
        return f"{key}={shown(problem['input'])}: expected a section, with keys such as {key}.{first}"
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if path else message
    return f"{key}={shown(problem['input'])}: {problem['msg']}"


def _sections_with(model: type[pydantic.BaseModel], key: str) -> list[str]:
    """Return ``'section.key'`` for each section that has the key ``key``; users forget the section."""
    nested = {name: _model_in(field.annotation) for name, field in model.model_fields.items()}
    return [
        repr(f"{name}.{key}") for name, section in nested.items() if section and key in section.model_fields
    ]


def _section_keys(model: type[pydantic.BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of the section that contains the key ``path``.

    Required keys come first, then the section's own keys, then inherited keys.
    """
    for part in path[:-1]:
        field = model.model_fields.get(part)
        nested = _model_in(field.annotation) if field is not None else None
        if nested is None:
            return []
        model = nested
    fields, own = model.model_fields, model.__annotations__
    return sorted(fields, key=lambda name: (not fields[name].is_required(), name not in own))


def _model_in(annotation: object) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
