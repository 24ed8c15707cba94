"""Find the plugins that a configuration selects, and the default plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_core import plugins
from spec_core.errors import ConfigError

DEFAULT_PLUGINS: Mapping[str, str] = {
    "backend": "cpu",
    "draft": "eagle3",
    "optimizer": "adamw",
    "strategy": "fsdp",
    "engine": "hf",
    "launcher": "local",
}
"""Section -> name of its default plugin."""
FIRST_DRAFT_WORDS = ("optimizer.name=muon", "optimizer.matrix_rate=2.857")
"""Optimizer of a draft that starts from random weights: in few steps it learns more (docs/hyperparameters.md)."""


def with_plugin_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the default plugin's name in each section that names no plugin."""
    parts = {section: values.get(section, {}) for section in DEFAULT_PLUGINS}
    named = {
        section: {"name": DEFAULT_PLUGINS[section], **part}
        for section, part in parts.items()
        if isinstance(part, dict)
    }
    return {**values, **named}


def named_plugin(interface: type[plugins.P], values: Mapping[str, Any]) -> type[plugins.P]:
    """Return the plugin class for ``interface`` that the configuration ``values`` select.

    Each interface has a section of the configuration, such as ``draft``. The default plugin is used if the section
    names none. Raise UsageError if the section is malformed, or if the plugin is not installed or cannot run here.
    """
    section = plugins.kind_of(interface)
    default = DEFAULT_PLUGINS[section]
    given = values.get(section, {})
    if not isinstance(given, dict):
        name = given if isinstance(given, str) else default
        raise ConfigError(f"{section}={given!r}: expected a section; write {section}.name={name}")
    name = given.get("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"{section}.name={name!r}: expected the name of a {section} plugin")
    return plugins.load_available(interface, name)
