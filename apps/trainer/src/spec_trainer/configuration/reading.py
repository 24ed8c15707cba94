"""Read the configuration: a YAML file, then flags, then ``section.key=value``; later values win."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml

from spec_core import Config, foreign_errors
from spec_core.errors import ConfigError
from spec_core.foreign import read_bytes
from spec_core.wording import shown

_FILE_BYTES = 1 << 20
_WORD_CHARACTERS = 1 << 16
_LEVELS = 32
"""Largest number of levels of nesting; a plugin's options have three or four."""
_KEY = re.compile(r"[^\s.\[\]]+(\.[^\s.\[\]]+)*")
_ODD_NUMBER = re.compile(r"[-+]?(0[xXbB][\da-fA-F_]+|0[0-7_]+|\d[\d.]*_[\d._]*|\d+(:[0-5]?\d)+(\.\d*)?)")
"""Numbers of YAML 1.1 that are not plain decimals: hexadecimal, binary, octal (010 is 8), 1_000, base 60."""
_ODD_BOOLEAN = re.compile(r"yes|no|on|off", re.IGNORECASE)
"""Booleans of YAML 1.1 that are strings in YAML 1.2."""
_VALUES = 1 << 17
"""Largest number of values of a configuration, with aliases expanded; each takes about 1 kB."""
_EVENTS: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return YAML's rules for the type of a plain scalar, changed as ``_Loader`` says.

    They map the scalar's first character to YAML tags, each with the pattern that selects it.
    """
    number = ("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"))
    known: Any = yaml.SafeLoader.yaml_implicit_resolvers
    kept = {first: [one for one in each if "timestamp" not in one[0]] for first, each in known.items()}
    return {**kept, **{first: [*kept.get(first, []), number] for first in "-+0123456789"}}


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.1, except that 1e-4 is a number, a date is a string, and a duplicate key is an error."""

    yaml_implicit_resolvers = _resolvers()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping node before merge keys (``<<``) are expanded. Raise YAMLError for a duplicate key."""
        node: Any = super().compose_mapping_node(anchor)
        keys: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            scalar = isinstance(key, yaml.ScalarNode) and key.value != "<<"
            if scalar and keys.setdefault(key.value, key) is not key:
                raise yaml.MarkedYAMLError(None, None, f"found duplicate key {key.value}", key.start_mark)
        return node


def read_configuration(
    file: Path | None,
    flags: Mapping[str, object],
    overrides: Sequence[str],
    defaults: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Merge a command's defaults, a YAML file, the flags and ``section.key=value`` arguments.

    ``defaults`` and ``flags``: dotted key -> value. Later layers win. Raise ConfigError, which names the file,
    line or argument that is wrong.
    """
    merged: dict[str, Any] = {}
    for key, value in (defaults or {}).items():
        merged = _merged(merged, _layer(key, value, f"{key}={value}"))
    if file is not None:
        merged = _merged(merged, _parse_file(file))
    for key, value in flags.items():
        word = f"{key}={value}"
        _check_word(word, f"override {shown(word)}")
        merged = _merged(merged, _layer(key, value, word))
    for word in overrides:
        merged = _merged(merged, _layer(*_parse_word(word), word))
    return merged


def read_resolved(file: Path) -> dict[str, Any]:
    """Return the values of a ``config.yaml`` that ``dump_yaml`` wrote."""
    text = _read_text(file)
    where = f"config file {file}"
    _check_yaml(text, where)
    return _load(text, where, yaml.SafeLoader)


def dump_yaml(config: Config) -> str:
    """Return the fully resolved configuration as YAML; reading it back gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _parse_file(file: Path) -> dict[str, Any]:
    where = f"config file {file}"
    text = _read_text(file)
    _check_yaml(text, where)
    return _load(text, where, _Loader)


def _load(text: str, where: str, loader: type[yaml.SafeLoader]) -> dict[str, Any]:
    with _yaml_errors(f"{where} is not YAML"):
        values = _parsed(text, loader)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds no mapping of sections")
    return {str(key): value for key, value in cast("dict[Any, Any]", values).items()}


def _parsed(text: str, loader: type[yaml.SafeLoader]) -> object:
    values: object = yaml.load(text, loader)
    # A list can hold itself, and !!int 0xfff… be a number of more digits than Python writes.
    json.dumps(values, default=str)
    return values


def _read_text(file: Path) -> str:
    content = read_bytes(file, ConfigError, _FILE_BYTES)
    with foreign_errors(ConfigError, f"config file {file} is not YAML"):
        return content.decode()


def _parse_word(word: str) -> tuple[str, object]:
    """Return the key and the parsed value of an argument ``section.key=value``."""
    where = f"override {shown(word)}"
    key, separator, text = word.partition("=")
    if not separator or not _KEY.fullmatch(key):
        raise ConfigError(f"{where} is not of the form section.key=value")
    if not text.strip():
        raise ConfigError(f"{shown(key)[1:-1]}= is empty; leave the word out, or write null")
    _check_word(word, where)
    _check_yaml(text, where)
    if text != text.strip():
        raise ConfigError(
            f"{where} has white space around its value; remove it, or put the value into quotes"
        )
    with foreign_errors(ConfigError, f"{where}: the value is not YAML"):
        return key, _parsed(text, _Loader)


def _check_word(word: str, where: str) -> None:
    if len(word) > _WORD_CHARACTERS:
        raise ConfigError(f"{where} has {len(word)} characters, expected at most {_WORD_CHARACTERS}")
    with foreign_errors(ConfigError, f"{where} is not Unicode"):
        word.encode()


def _check_yaml(text: str, where: str) -> None:
    """Raise ConfigError for deep nesting, too many values or misleading scalars, before the text is loaded.

    The YAML loader is recursive and would crash on very deep nesting; this check is iterative.
    """
    size = 0
    begun = list[tuple[str | None, int]]()
    sizes = dict[str | None, int]()
    try:
        for event in yaml.parse(text, Loader=_EVENTS):
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, size))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = begun.pop()
                sizes[anchor] = size - before
            size += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
            if len(begun) > _LEVELS:
                raise ConfigError(f"{where} is nested in more than {_LEVELS} levels")
            if size > _VALUES:
                raise ConfigError(f"{where} has more than {_VALUES} values, with its aliases written out")
            if isinstance(event, yaml.ScalarEvent):
                _check_scalar(event, where)
    except yaml.YAMLError:
        return  # the loader finds it too, with a better message


def _check_scalar(event: yaml.ScalarEvent, where: str) -> None:
    if "\0" in event.value:
        raise ConfigError(f"{where}: {shown(event.value)} holds the character NUL, which no value can have")
    if event.implicit[0] and _ODD_NUMBER.fullmatch(event.value):
        raise ConfigError(
            f"{where}: {shown(event.value)} is not a decimal number; write decimal digits, or quotes around a text"
        )
    if event.implicit[0] and _ODD_BOOLEAN.fullmatch(event.value):
        raise ConfigError(
            f"{where}: {shown(event.value)} is neither true nor false; write one, or quotes around a text"
        )


@contextmanager
def _yaml_errors(problem: str) -> Generator[None]:
    """Turn YAML errors in the ``with`` block into ConfigError.

    The message begins with ``problem``; YAML's message and line follow.
    """
    with foreign_errors(ConfigError, problem):
        try:
            yield
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error


def _layer(key: str, value: Any, word: str) -> dict[str, Any]:
    """Return nested mappings that set only the dotted ``key`` to ``value``."""
    if key.count(".") > _LEVELS:
        raise ConfigError(f"override {shown(word)} is nested in more than {_LEVELS} levels")
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _merged(below: Any, above: Any) -> Any:
    """Return both mappings merged key by key; where both have a value, the value of ``above`` is taken."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    lower, upper = cast("dict[Any, Any]", below), cast("dict[Any, Any]", above)
    return {**lower, **{key: _merged(lower.get(key), value) for key, value in upper.items()}}
