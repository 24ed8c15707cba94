"""A combination of keys or options that is refused; ``combinations`` has all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from spec_core.errors import ConfigError
from spec_core.wording import shortened

_VALUE = re.compile(r"([a-z0-9_.-]+)=\*")
_CLAUSE = re.compile(r"(without )?(--[a-z-]+|(?:[a-z0-9_]+\.)+[a-z0-9_]+)(?:=(\S+))?")


@dataclass(frozen=True)
class Combination:
    """Settings that do not go together; ``KEY=*`` in a text stands for the key or ``--option`` and its value."""

    settings: str
    why: str
    remedy: str
    refused: Callable[[Any, Any], bool] | None = None
    """Returns whether a configuration or request has these settings; its second argument is ``known`` of ``refuse``.
    None: the text ``settings`` says it. A key ``=*`` must differ from its default, a key with a value must have it,
    and a key behind ``without`` must be unset."""

    def is_in(self, given: object, known: object) -> bool:
        """Return whether ``given``, a configuration or a request, has these settings."""
        if self.refused is not None:
            return self.refused(given, known)
        return all(_holds(given, *clause.groups()) for clause in _CLAUSE.finditer(self.settings))

    def message(self, given: object) -> str:
        """Return the error message for ``given``, with its values."""
        return _VALUE.sub(lambda key: f"{key[1]}={_shown(given, key[1])}", str(self))

    def __str__(self) -> str:
        """Return the message without values."""
        return f"{self.settings}: {self.why}; {self.remedy}"


def refuse(table: Iterable[Combination], given: object, known: object = None) -> None:
    """Raise ConfigError for the first combination of ``table`` that ``given``, a configuration or a request, has."""
    for combination in table:
        if combination.is_in(given, known):
            raise ConfigError(combination.message(given))


def _value(given: object, key: str) -> Any:
    return attrgetter(_name(key))(given)


def _name(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _shown(given: object, key: str) -> str:
    value = _value(given, key)
    return shortened(",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value), 200)


def _holds(given: object, without: str | None, key: str, value: str | None) -> bool:
    if value not in (None, "*"):
        return _shown(given, key) == value
    return changed(given, key) != bool(without)


def changed(given: object, key: str) -> bool:
    """Return whether a key has another value than its default; the resolved ``config.yaml`` sets every key."""
    if key.startswith("--"):
        return _value(given, key) not in (None, False, getattr(type(given), _name(key), None))
    section, _, name = key.rpartition(".")
    found = attrgetter(section)(given)
    return getattr(found, name) != type(found).model_fields[name].default
