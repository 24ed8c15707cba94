"""Trackers of a run: the installed ones have keys in section ``track``, and those that it asks for are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core import Tracker, plugins
from spec_core.errors import ConfigError, RunError
from spec_core.foreign import foreign_errors
from spec_core.wording import shown

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
    """Return the trackers that the configuration asks for. Raise RunError where one does not open."""
    return [_open(name, value, directory) for name, value in _asked(config).items()]


def _open(name: str, value: object, directory: RunDirectory) -> Tracker:
    remedy = "see to its server and variables, or remove the key"
    with foreign_errors(RunError, f"track.{name}={shown(value)}: the tracker does not open; {remedy}"):
        return plugins.load(Tracker, name)(value, directory.root)


def _asked(config: TrackConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: value for name, value in values.items() if value not in (None, False)}
