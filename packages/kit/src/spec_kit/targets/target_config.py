"""Read a target's config.json: its checked values and its model type.

``target_types`` interprets the values for each model type; ``target_rope`` reads the rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

from spec_core import TargetType, read_json_object
from spec_core.errors import TargetError
from spec_kit.targets.quiet_transformers import quiet_transformers
from spec_kit.targets.target_types import target_type

_EXPECTED = "a target is the folder of a model, with its config.json, safetensors and tokenizer"
_TIE = "tie_word_embeddings"
_LARGEST = 2**53  # a float holds every smaller integer exactly


class TargetConfig:
    """The values of a target's config.json; values of a nested ``text_config`` take precedence.

    For a missing value, such as the number of heads in Gemma 3's files, the default of transformers for this
    model type is used.
    """

    def __init__(self, folder: Path) -> None:
        """Read config.json in ``folder``. Raise TargetError if it is missing or no JSON object."""
        if not folder.is_dir():
            raise TargetError(f"target {folder} is not a folder; {_EXPECTED}")
        self.file = folder / "config.json"
        if not self.file.exists():
            if (folder / "adapter_config.json").exists():
                raise TargetError(
                    f"target {folder} has only an adapter (adapter_config.json), expected a whole model; "
                    f"merge the adapter into its base model, and give the folder of the result"
                )
            raise TargetError(f"target {folder} has no config.json; {_EXPECTED}")
        self._top = read_json_object(self.file, TargetError)
        nested: object = self._top.get("text_config")
        self._nested = cast("dict[str, Any] | None", nested if isinstance(nested, dict) else None)
        self._values: dict[str, Any] = {**self._top, **(self._nested or {})}
        self.architecture = self._architecture()

    @cached_property
    def model_type(self) -> str:
        """Model type of the text model. Raises TargetError if it, or the top-level ``model_type``, is unknown."""
        found: object = self._top.get("model_type")
        known = target_type(found) if isinstance(found, str) else None
        if self._nested is None and isinstance(known, TargetType):
            return str(found)
        if not isinstance(known, str):
            raise self._unknown(found)
        if self._nested is None:
            inner_type = target_type(known)
            if isinstance(inner_type, TargetType) and inner_type.may_be_flat:
                return known
            raise self._unknown(found)
        inner: object = self._nested.get("model_type", known)
        if inner != known:
            raise self.error(("text_config.model_type",), inner, f"{known!r}, the text model of {found!r}")
        return known

    @cached_property
    def described(self) -> TargetType:
        """Description of how the code of this model type treats embedding, head and positions."""
        known = target_type(self.model_type)
        if not isinstance(known, TargetType):
            raise self._unknown(self.model_type)
        return known

    def get(self, *names: str) -> Any:
        """Return the value of the first of ``names`` that is present and not null, or None."""
        return next((found for name in names if (found := self._values.get(name)) is not None), None)

    @cached_property
    def _left_out(self) -> Mapping[str, Any]:
        """The file's values as transformers reads them, with defaults for the values that the file lacks.

        Empty if transformers is not installed or cannot read the file.
        """
        values = deepcopy(self._top if self._nested is None else self._nested)  # transformers writes to it
        with suppress(Exception), quiet_transformers():  # it may raise any error for invalid values
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            return CONFIG_MAPPING[self.model_type].from_dict(values).to_dict()
        return {}

    def is_null(self, name: str) -> bool:
        """Return whether ``name`` is present with the value null."""
        return name in self._values and self._values[name] is None

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the positive integer under one of ``names``. Raise TargetError if missing or invalid."""
        value = self._value(names, default)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise self.error(names, value, "a positive integer")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the finite number under one of ``names``. Raise TargetError if missing or invalid."""
        value = self._value(names, default)
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:
            raise self.error(names, value, "a number")
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        """Return the number above 0 under one of ``names``. Raise TargetError if missing or invalid."""
        value = self.number(*names, default=default)
        if value <= 0:
            raise self.error(names, value, "a positive number")
        return value

    def word(self, *names: str, default: str) -> str:
        """Return the string under one of ``names``. Raise TargetError if it is no string."""
        value = self._value(names, default)
        if not isinstance(value, str):
            raise self.error(names, value, "a name")
        return value

    def flag(self, name: str) -> bool:
        """Return the boolean ``name``, false if absent. Raise TargetError for any other value, null included."""
        return self._flag(name, self._values.get(name, False))

    @property
    def unties(self) -> bool:
        """Whether config.json says that head and embedding are not tied."""
        return self._stored_tie is False

    @property
    def ties(self) -> bool:
        """Whether head and embedding are tied, by config.json or by transformers' default of this model type."""
        stored = self._stored_tie
        return self._left_out.get(_TIE) is True if stored is None else stored

    @property
    def _stored_tie(self) -> bool | None:
        """The value of config.json, None if absent; the top level takes precedence."""
        outer = self._top if _TIE in self._top else self._values
        return self._flag(_TIE, outer[_TIE]) if _TIE in outer else None

    def section(self, name: str) -> dict[str, Any]:
        """Return the object ``name`` of config.json, empty if it is absent or null."""
        value: object = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error((name,), value, "an object")
        return dict(cast("dict[str, Any]", value or {}))

    def token_ids(self, name: str, value: object) -> tuple[int, ...]:
        """Return the token ids in ``value``, which is an id, a list of ids, or null for none.

        ``name``: name of the value in error messages.
        """
        ids = cast("list[object]", value if isinstance(value, list) else [] if value is None else [value])
        vocab_size = self.integer("vocab_size")
        if any(type(one) is not int or not 0 <= one < vocab_size for one in ids):
            raise self.error((name,), value, f"token ids below vocab_size={vocab_size}")
        return cast("tuple[int, ...]", tuple(ids))

    def error(self, names: Sequence[str], value: object, expected: str) -> TargetError:
        """Return the error for an invalid value under ``names``. ``expected``: description of valid values."""
        others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        return TargetError(f"{self.file}: {names[0]}={value!r:.80}, expected {expected}{others}")

    def _unknown(self, found: object) -> TargetError:
        kind = "types" if self._nested is None else "types with a text_config"
        return TargetError(
            f"{self.file}: model_type={found!r:.80} is none of the {kind} whose norm, embedding, head and positions "
            f"are known; docs/targets.md lists them, and says how a plugin adds one"
        )

    def _flag(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.error((name,), value, "true or false")
        return value

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        values = chain((self.get(*names),), (self._left_out.get(name) for name in names), (default,))
        return next((value for value in values if value is not None), None)

    def _architecture(self) -> str:
        names: object = self._top.get("architectures")
        if not names:
            return ""
        first: object = cast("list[object]", names)[0] if isinstance(names, list) else None
        if not isinstance(first, str):
            raise self.error(("architectures",), names, "a list of names")
        return first
