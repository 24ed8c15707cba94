"""Check the arguments of a command line before they are parsed. It imports little, for a fast start."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args

from cyclopts import Token, convert

from spec_core.errors import ConfigError
from spec_core.wording import shown

_SPELLINGS = {
    int: re.compile(r"[-+]?[0-9]+"),
    float: re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?inf|nan"),
}
_SWITCHES = {
    "--json",
    "--stop-at-eos",
    "--untrained",
    "--breakdown",
    "--by-length",
    "--card",
    "--thorough",
    "--drop-cut",
    "--whole-target",
    "--serve-elsewhere",
    "--quiet",
    "--verbose",
}
"""Boolean flags; cyclopts by itself also accepts ``yes`` and ``1`` as their values."""
_LONGEST = 1 << 16


def check_command_line(words: Sequence[str]) -> None:
    """Raise ConfigError for an argument, or a flag's value, that is empty, contains NUL or is too long.

    An empty argument comes from an unset shell variable; pathlib would read it as the working directory.
    """
    for before, word in zip(("", *words), words, strict=False):
        flag, separator, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if separator and not value.strip():
            what = flag if flag.startswith("--") else "a word of the command line"
            raise ConfigError(f"{what} is empty; leave it out, or give it a value")
        if word.startswith("--") and separator and flag in _SWITCHES and value not in ("true", "false"):
            raise ConfigError(f"{flag}={shown(value)}: expected {flag} alone, or true or false")
        if "\0" in word:
            raise ConfigError(f"{shown(word)} holds the character NUL, which no word can have")
        if len(word) > _LONGEST:
            raise ConfigError(f"{shown(word)} has {len(word)} characters, expected at most {_LONGEST}")


def check_overrides(overrides: Sequence[str], commands: Sequence[str]) -> None:
    """Raise ConfigError if the first argument is neither a flag, a command nor ``section.key=value``."""
    if overrides and "=" not in overrides[0]:
        if os.path.isfile(overrides[0]):
            raise ConfigError(
                f"{shown(overrides[0])} is a file: write --config before a configuration, --data before data"
            )
        raise ConfigError(
            f"{shown(overrides[0])} is neither a command ({', '.join(commands)}) nor section.key=value"
        )


def convert_flag(hint: Any, tokens: Sequence[Token] | Mapping[str, Any]) -> Any:
    """Convert a flag's value to its type. Raise ValueError for a spelling that is not allowed.

    By itself cyclopts reads ``null`` as None, rounds 1.5 to an integer, and accepts 0x1 and 1_0.
    """
    kind = _without_none(hint)
    pattern = _SPELLINGS.get(kind)
    if pattern is not None and not all(pattern.fullmatch(token.value) for token in tokens):
        raise ValueError
    return convert(kind, tokens)


def _without_none(hint: Any) -> Any:
    """Return a type hint without None: ``int`` for ``int | None``; any other hint is returned unchanged."""
    if not isinstance(hint, UnionType):
        return hint
    (kind,) = (member for member in get_args(hint) if member is not NoneType)
    return kind
