"""This module defines section ``track`` of the configuration, with a key for each installed tracker."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import Field, create_model, model_validator

from spec_core import Config, Tracker, plugins
from spec_core.errors import PluginError


class TrackConfig(Config):
    """Section ``track``: further trackers besides metrics.jsonl; each installed tracker has a key."""

    @model_validator(mode="before")
    @classmethod
    def _asked_or_installed(cls, values: Any) -> Any:
        """Drop the keys of trackers that are neither installed nor enabled.

        A ``config.yaml`` of an earlier run may have such keys.
        """
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key in cls.model_fields or value}


def is_asked_for(value: object) -> bool:
    """Return whether a key's value enables its tracker: any value except null and false does."""
    return value is not None and value is not False


def track_config_type(section: object = None) -> type[TrackConfig]:
    """Return the class of section ``track``, with a key for every installed tracker.

    ``section``: the values of this section in a configuration. If it is given, only the trackers that it
    enables are imported. The key of a tracker that is not imported takes any value.
    """
    asked = None if section is None else section if isinstance(section, dict) else {}
    names = sorted({record.name for record in plugins.installed(Tracker)})
    return _config_type(
        tuple(
            (name, _loaded(name) if asked is None or is_asked_for(asked.get(name)) else None)
            for name in names
        )
    )


def _loaded(name: str) -> type[Tracker] | None:
    try:
        return plugins.load(Tracker, name)
    except PluginError:
        return None


@functools.cache  # equal trackers get one type, because configurations are equal only within a type
def _config_type(trackers: tuple[tuple[str, type[Tracker] | None], ...]) -> type[TrackConfig]:
    keys: dict[str, Any] = {}
    for name, tracker in trackers:
        if tracker is None:
            keys[name] = (Any, None)
        else:
            field = Field(default=tracker.default, description=tracker.description)
            keys[name] = (tracker.Value if tracker.default is False else tracker.Value | None, field)
    return create_model("TrackConfig", __base__=TrackConfig, **keys)
