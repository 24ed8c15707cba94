"""Read and validate the keys ``push.options.NAME``: the options of the weight transport NAME."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, create_model

from spec_core import Config, WeightTransport, WeightTransportConfig, plugins
from spec_core.validation import validate
from spec_trainer.configuration import read_configuration

TransportOptions = dict[str, dict[str, Any]]
"""Name of a weight transport -> its options as the user wrote them, without defaults."""


class _PushSection(Config):
    options: TransportOptions = Field(default_factory=dict)


class _PushWords(Config):
    push: _PushSection = _PushSection()


def read_transport_options(words: Sequence[str]) -> TransportOptions:
    """Return the options in arguments ``push.options.NAME.KEY=VALUE``. Raise ConfigError for others."""
    values = read_configuration(None, {}, words)
    return anchor_options(validate(_PushWords, values, "options").push.options)


def absolute(path: str) -> str:
    """Return the absolute form of a path, with ``~`` expanded; an empty string stays empty."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def anchor_options(options: Any) -> Any:
    """Return the transports' options with every option of type Path made absolute."""
    if not isinstance(options, dict):
        return options
    return {name: _anchored(name, keys) if isinstance(keys, dict) else keys for name, keys in options.items()}


def _anchored(transport: str, keys: dict[str, Any]) -> dict[str, Any]:
    fields = plugins.load(WeightTransport, transport).Config.model_fields
    paths = [key for key, field in fields.items() if Path in (field.annotation, *get_args(field.annotation))]
    return {
        key: absolute(value) if key in paths and isinstance(value, str) else value
        for key, value in keys.items()
    }


def transport_configs(options: TransportOptions, source: str) -> dict[str, WeightTransportConfig]:
    """Return name of a transport -> its options as an instance of the transport's ``Config``.

    Raise UsageError, with a line that begins with ``source``, if a transport is not installed or does not have an
    option.
    """
    if not options:
        return {}
    configs = {name: plugins.load(WeightTransport, name).Config for name in options}
    section = _section_of(configs)
    whole = _section_of({"push": _section_of({"options": section})})
    checked: Any = validate(whole, {"push": {"options": options}}, source)
    return {name: getattr(checked.push.options, name) for name in options}


def _section_of(keys: Mapping[str, type[Config]]) -> type[Config]:
    """Return a Config class with a field for each of ``keys``, whose type is the key's Config class.

    Validation by this class gives errors that name an option by its path, such as NAME.KEY.
    """
    fields: dict[str, Any] = {name: (model, ...) for name, model in keys.items()}
    return create_model("Section", __base__=Config, **fields)
