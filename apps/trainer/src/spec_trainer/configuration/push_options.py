"""Keys ``push.options.NAME``: options of single weight transports, checked by the ``Config`` of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import Field, create_model

from spec_core import Config, WeightTransport, WeightTransportConfig, plugins
from spec_core.validation import validate
from spec_trainer.configuration import read_configuration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TransportOptions = dict[str, dict[str, Any]]
"""Name of a weight transport -> its options as they were written: ``config.yaml`` names no transport that nobody has
asked for."""


class _PushSection(Config):
    options: TransportOptions = Field(default_factory=dict)


class _PushWords(Config):
    push: _PushSection = _PushSection()


def read_transport_options(words: Sequence[str]) -> TransportOptions:
    """Return the options in a command's words, ``push.options.NAME.KEY=VALUE``. Raise ConfigError for others."""
    values = read_configuration(None, {}, words)
    return anchor_options(validate(_PushWords, values, "options").push.options)


def absolute(path: str) -> str:
    """Return a path as it is from any working directory; the empty one stays."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def anchor_options(options: Any) -> Any:
    """Return the options with each path absolute; what is no option of a transport stays as it is."""
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
    """Return the options as each transport's own ``Config``, which knows those that were written.

    Raise UsageError, one line that begins with ``source``, for a transport that is not installed and for options that
    are not its own.
    """
    configs = {name: plugins.load(WeightTransport, name).Config for name in options}
    section = _section_of(configs)
    whole = _section_of({"push": _section_of({"options": section})})
    checked: Any = validate(whole, {"push": {"options": options}}, source)
    return {name: getattr(checked.push.options, name) for name in options}


def _section_of(keys: Mapping[str, type[Config]]) -> type[Config]:
    """Return a section with these keys, so that a message names a key by its whole path."""
    fields: dict[str, Any] = {name: (model, ...) for name, model in keys.items()}
    return create_model("Section", __base__=Config, **fields)
