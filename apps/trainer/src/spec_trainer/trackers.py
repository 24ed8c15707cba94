"""Trackers of a run: the installed ones have keys in section ``track``, and those that it asks for are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core import Tracker, plugins
from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from spec_trainer.run_directory import RunDirectory
    from spec_trainer.track_config import TrackConfig


def check_trackers(config: TrackConfig) -> None:
    """Raise ConfigError if the client of a tracker that the configuration asks for is not installed."""
    for name in _asked(config):
        found = plugins.load(Tracker, name).probe()
        if not found.ok:
            raise ConfigError(f"track.{name}: {found.reason}, or remove the key")


def build_trackers(config: TrackConfig, directory: RunDirectory) -> list[Tracker]:
    """Return the trackers that the configuration asks for."""
    return [plugins.load(Tracker, name)(value, directory.root) for name, value in _asked(config).items()]


def _asked(config: TrackConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: value for name, value in values.items() if value not in (None, False)}
