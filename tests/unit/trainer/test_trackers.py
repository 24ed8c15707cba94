"""Installed trackers have keys, and a run opens those that it asks for."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from spec_core import Tracker, plugins
from spec_core.errors import ConfigError, PluginImportFailed, RunError
from spec_core.records import Availability
from spec_trainer.run_directory import RunDirectory
from spec_trainer.track_config import track_config_type
from spec_trainer.trackers import build_trackers, check_trackers


class Noting(Tracker):
    name, api_version = "noting", 2

    def log(self, step, scalars): ...

    def close(self): ...


@pytest.fixture
def installed(monkeypatch):
    """Two trackers, of which one does not load."""
    found = {"noting": Noting, "broken": PluginImportFailed("tracker 'broken' does not import")}
    monkeypatch.setattr(plugins, "load_each", lambda interface: found.items())
    monkeypatch.setattr(plugins, "load", lambda interface, name: found[name])
    return track_config_type()


def test_a_tracker_is_opened_where_its_key_has_a_value(installed, tmp_path):
    directory = RunDirectory(tmp_path)
    assert build_trackers(installed(), directory) == []
    (tracker,) = build_trackers(installed(noting="project"), directory)
    assert (tracker.value, tracker.folder) == ("project", tmp_path)
    with pytest.raises(ValidationError, match="at least 1 character"):
        installed(noting="")


def test_a_file_may_have_the_keys_of_trackers_that_are_not_installed_here(installed):
    written = json.loads(installed(noting="project").model_dump_json()) | {"elsewhere": None, "other": False}
    assert installed(**written) == installed(noting="project")
    with pytest.raises(ValidationError, match="elsewhere"):
        installed(elsewhere="project")


def test_a_client_that_is_missing_is_named(installed, monkeypatch):
    missing = Availability(ok=False, reason="noting is not installed; pip install noting")
    monkeypatch.setattr(Noting, "probe", lambda: missing)
    check_trackers(installed())
    with pytest.raises(
        ConfigError, match=r"^track.noting: noting is not installed; pip install noting, or rem"
    ):
        check_trackers(installed(noting="project"))


def test_a_tracker_that_does_not_open_is_named_in_one_line(installed, tmp_path, monkeypatch):
    def unreachable(self, value, folder):
        raise ConnectionError("no server at http://127.0.0.1:9\nRetried 5 times.")

    monkeypatch.setattr(Noting, "__init__", unreachable)
    with pytest.raises(RunError) as caught:
        build_trackers(installed(noting="project"), RunDirectory(tmp_path))
    assert str(caught.value) == (
        "track.noting='project': the tracker does not open; see to its server and variables, or remove the key: "
        "ConnectionError: no server at http://127.0.0.1:9"
    )
