"""Strict configuration: a YAML file, then flags, then overrides; validated once, with defaults in the fields."""

from __future__ import annotations

import difflib
import io
import json
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast, get_args

import pydantic
import yaml
from omegaconf import DictConfig, OmegaConf

from spec_core.errors import ConfigError
from spec_core.foreign import foreign_errors, read_bytes
from spec_core.references import check_references, resolve_references
from spec_core.wording import shown

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

C = TypeVar("C", bound="Config")

Seconds = Annotated[float, pydantic.Field(gt=0, le=1e6)]
"""Seconds, eleven days at most: Python's sockets count milliseconds in 32 bits."""

_FILE_BYTES = 1 << 20
_WORD_CHARACTERS = 1 << 16
_LEVELS = 32
"""Levels of nesting; a plugin's options have three or four."""
_KEY = re.compile(r"[^\s.\[\]]+(\.[^\s.\[\]]+)*")
_ODD_NUMBER = re.compile(r"[-+]?(0[xXbB][\da-fA-F_]+|0[0-7_]+|\d[\d.]*_[\d._]*|\d+(:[0-5]?\d)+(\.\d*)?)")
"""Numbers of YAML 1.1 that are not decimal: hexadecimal, binary, octal (010 is 8), grouped, to the base 60."""
_ODD_BOOLEAN = re.compile(r"yes|no|on|off", re.IGNORECASE)
"""Booleans of YAML 1.1 that are texts in YAML 1.2."""
_VALUES = 1 << 17
"""Values of a configuration, where an alias counts as what it stands for: each takes about 1 kB."""
_EVENTS: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Config(pydantic.BaseModel):
    """Base of every configuration section: frozen, strict types, unknown keys are errors."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class BackendConfig(Config):
    """Section ``backend``; a plugin's own options are fields of its subclass."""

    name: str = "cpu"
    """Hardware; a backend plugin."""


class DraftConfig(Config):
    """Section ``draft``; a draft's own options are fields of its subclass."""

    name: str = "eagle3"
    """Drafting algorithm; a draft plugin."""
    init_from: Path | None = None
    """Folder of a published draft to start from."""


class StrategyConfig(Config):
    """Section ``strategy``; a strategy's own options are fields of its subclass."""

    speed_only: ClassVar[frozenset[str]] = frozenset()
    """Options that change what training costs and no result but by rounding. A run resumes with any value of these;
    all others belong to its identity."""

    name: str = "fsdp"
    """How the trainer is parallel; a strategy plugin."""


class EngineConfig(Config):
    """Section ``engine``; an engine's own options are fields of its subclass."""

    name: str = "hf"
    """Engine that runs the target; an engine plugin."""
    replicas: int = pydantic.Field(1, ge=1, le=65536)
    """Engines side by side, each with the whole target."""
    replacements: int = pydantic.Field(3, ge=0)
    """Times that a run starts each replica again that has died or fallen silent; then it ends. With an inline one, or
    one that decodes, it ends at once."""
    tensor_parallel: int = pydantic.Field(1, ge=1)
    """Devices that one replica spreads over."""
    batch_tokens: int = pydantic.Field(8192, ge=1)
    """Most tokens that one forward pass of the target takes (padding included)."""
    send_timeout_s: Seconds = 300.0
    """Longest wait for a trainer to connect to, or to have room for a sample."""


class LauncherConfig(Config):
    """Section ``launcher``; a launcher's own options are fields of its subclass."""

    name: str = "local"
    """Who starts the processes; a launcher plugin."""


class WeightTransportConfig(Config):
    """Options of a weight transport; a transport's own ones are fields of its subclass."""

    bucket_bytes: int = pydantic.Field(256 << 20, ge=4096)
    """Most bytes of weights that are sent at once."""


class TrackerConfig(Config):
    """Options of a tracker: none, a run's key ``track.NAME`` has all."""


def read_configuration(
    file: Path | None, flags: Mapping[str, object], overrides: Sequence[str]
) -> dict[str, Any]:
    """Merge a YAML file, the command line's flags (dotted key -> value) and ``section.key=value`` words.

    Later layers win; ``${section.key}`` stands for another key's value. Raise ConfigError with the file, line or
    word that is wrong.
    """
    layers = [_parse_file(file)] if file is not None else []
    layers.append(OmegaConf.create())
    for key, value in flags.items():
        word = f"{key}={value}"
        _check_word(word, f"override {shown(word)}")
        check_references(str(value), f"override {shown(word)}")
        _assign(layers[-1], key, value, word)
    for word in overrides:
        _assign(layers[-1], *_parse_word(word), word)
    with foreign_errors(ConfigError, "configuration does not merge"):
        merged = cast("dict[Any, Any]", OmegaConf.to_container(OmegaConf.merge(*layers)))
        json.dumps(merged, default=str)  # 0xfff… can be a number of more digits than Python writes
    return resolve_references({str(key): value for key, value in merged.items()})


def read_resolved(file: Path) -> dict[str, Any]:
    """Return the values of a ``config.yaml`` that ``dump_yaml`` wrote; nothing in them is a reference."""
    text, where = _read_text(file), f"config file {file}"
    _check_yaml(text, where, resolved=True)
    with _yaml_errors(f"{where} is not YAML"):
        values: object = yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ConfigError(f"config file {file} holds no mapping of sections")
    return {str(key): value for key, value in cast("dict[Any, Any]", values).items()}


def validate(model: type[C], values: Mapping[str, Any], source: str) -> C:
    """Check ``values`` against ``model``; the first problem becomes a one-line ConfigError."""
    with foreign_errors(ConfigError, source):
        for key, number in _integers(values):
            if abs(number) >= 1 << 63:  # it counts nothing, and overflows where it is divided
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
    """Yield key and value of every integer below ``value``."""
    if isinstance(value, int):
        yield key, value
    elif isinstance(value, dict):
        for name, part in cast("dict[Any, Any]", value).items():
            yield from _integers(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from _integers(part, key)


def dump_yaml(config: Config) -> str:
    """Return the fully resolved configuration as YAML; reading it back gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return `` (did you mean 'x'?)`` or, if no known word is close, the list of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(sorted(known))})"


def _parse_file(file: Path) -> DictConfig:
    where = f"config file {file}"
    text = _read_text(file)
    _check_yaml(text, where)
    with _yaml_errors(f"{where} is not YAML"):
        layer = OmegaConf.load(io.StringIO(text))
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{where} holds no mapping of sections")
    return layer


def _read_text(file: Path) -> str:
    content = read_bytes(file, ConfigError, _FILE_BYTES)
    with foreign_errors(ConfigError, f"config file {file} is not YAML"):
        return content.decode()


def _parse_word(word: str) -> tuple[str, object]:
    """Return key and value of ``section.key=value``."""
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
    # OmegaConf's YAML rules, so that 1e-4 is a number on the command line as in a file.
    with foreign_errors(ConfigError, f"{where}: the value is not YAML"):
        parsed = cast("dict[Any, Any]", OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"])))
    return key, parsed["value"]


def _check_word(word: str, where: str) -> None:
    if len(word) > _WORD_CHARACTERS:
        raise ConfigError(f"{where} has {len(word)} characters, expected at most {_WORD_CHARACTERS}")
    with foreign_errors(ConfigError, f"{where} is not Unicode"):
        word.encode()


def _check_yaml(text: str, where: str, resolved: bool = False) -> None:
    """Refuse deep nesting, aliases that grow without end and wrong references before the text is loaded.

    The loader is recursive, in C too, and would crash on endless nesting; here one event follows the other.
    ``resolved``: nothing in the text is a reference.
    """
    size, begun, sizes = 0, list[tuple[str | None, int]](), dict[str | None, int]()
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
                _check_scalar(event, where, resolved)
    except yaml.YAMLError:
        return  # the loader finds it too, with a better message


def _check_scalar(event: yaml.ScalarEvent, where: str, resolved: bool) -> None:
    if not resolved:
        check_references(event.value, where)
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
    """Raise ConfigError as ``foreign_errors`` does, with the lines of YAML's own message, which name the place."""
    with foreign_errors(ConfigError, problem):
        try:
            yield
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error


def _assign(layer: DictConfig, key: str, value: object, word: str) -> None:
    if key.count(".") > _LEVELS:
        raise ConfigError(f"override {shown(word)} is nested in more than {_LEVELS} levels")
    with foreign_errors(ConfigError, f"override {shown(word)} cannot be applied"):
        OmegaConf.update(layer, key, value, force_add=True)


def _explain(model: type[Config], error: pydantic.ValidationError) -> str:
    # An unknown key first: a misspelt one is also why another is missing.
    problem = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in problem["loc"] if isinstance(part, str)]
    key = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "extra_forbidden":
        kind = "section or key" if len(path) == 1 else "key"
        homes = _sections_with(model, path[0]) if len(path) == 1 else []
        hint = f" (did you mean {' or '.join(homes)}?)" if homes else ""
        return f"unknown {kind} {shown(key)}" + (hint or suggestion(path[-1], _keys_beside(model, path)))
    if problem["type"] == "missing":
        inner = next(iter(_keys_beside(model, [*path, ""])), "")  # of a section that is missing as a whole
        key = f"{key}.{inner}" if inner else key
        example = f", such as {key}=VALUE" if len(path) == len(problem["loc"]) else ""
        return f"{key} is required{example}"
    if problem["type"] == "model_type":
        first = next(iter(_keys_beside(model, [*path, ""])), "key")
        return f"{key}={shown(problem['input'])}: expected a section, with keys such as {key}.{first}"
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if path else message
    return f"{key}={shown(problem['input'])}: {problem['msg']}"


def _sections_with(model: type[pydantic.BaseModel], key: str) -> list[str]:
    """Return ``'section.key'`` for each section that has such a key: users forget the section."""
    nested = {name: _model_in(field.annotation) for name, field in model.model_fields.items()}
    return [
        repr(f"{name}.{key}") for name, section in nested.items() if section and key in section.model_fields
    ]


def _keys_beside(model: type[pydantic.BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of the section in which ``path`` ends, required ones first."""
    for part in path[:-1]:
        field = model.model_fields.get(part)
        nested = _model_in(field.annotation) if field is not None else None
        if nested is None:
            return []
        model = nested
    return sorted(model.model_fields, key=lambda name: not model.model_fields[name].is_required())


def _model_in(annotation: object) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
