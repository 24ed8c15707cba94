"""Installed trackers have keys, and a run opens those that it asks for."""

import json
import logging
import threading
from typing import ClassVar

import pytest
from pydantic import ValidationError

from spec_core import Tracker, plugins
from spec_core.errors import ConfigError, PluginImportFailed
from spec_core.records import Availability
from spec_trainer.configuration.track import track_config_type
from spec_trainer.run import trackers
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.trackers import build_trackers, check_trackers


class Noting(Tracker):
    name, api_version = "noting", 1
    made: ClassVar[list] = []

    def __init__(self, value, folder):
        super().__init__(value, folder)
        self.steps, self.thread = [], threading.current_thread()
        self.made.append(self)
        self.act("open")

    def log(self, step, scalars):
        assert threading.current_thread() is self.thread
        self.steps.append(step)
        self.act(f"take step {step}")

    def close(self):
        assert threading.current_thread() is self.thread
        self.steps.append("closed")
        self.act("close")

    def act(self, doing): ...


class Record:
    def __init__(self, name):
        self.name, self.owner = name, f"spec-tracker-{name} 1.0"


@pytest.fixture
def installed(monkeypatch):
    """Two trackers, of which one does not load."""

    def load(interface, name):
        if name == "broken":
            raise PluginImportFailed("tracker 'broken' does not import")
        return Noting

    monkeypatch.setattr(Noting, "made", [])
    monkeypatch.setattr(plugins, "installed", lambda interface: [Record("noting"), Record("broken")])
    monkeypatch.setattr(plugins, "load", load)
    monkeypatch.setattr(plugins, "find", lambda interface, name: Record(name))
    monkeypatch.setattr(plugins, "load_record", lambda interface, record: load(interface, record.name))
    return track_config_type()


def test_a_tracker_is_opened_where_its_key_has_a_value(installed, tmp_path):
    directory = RunDirectory(tmp_path)
    assert build_trackers(installed(), directory) == []
    (tracker,) = build_trackers(installed(noting="project"), directory)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    tracker.close()
    (made,) = Noting.made
    assert (made.value, made.folder, made.steps) == ("project", tmp_path, [1, "closed"])
    assert made.thread is not threading.main_thread()
    with pytest.raises(ValidationError, match="at least 1 character"):
        installed(noting="")


def test_a_file_may_have_the_keys_of_trackers_that_are_not_installed_here(installed):
    written = json.loads(installed(noting="project").model_dump_json()) | {"elsewhere": None, "other": False}
    assert installed(**written) == installed(noting="project")
    with pytest.raises(ValidationError, match="elsewhere"):
        installed(elsewhere="project")


def test_only_trackers_that_a_run_asks_for_are_imported(installed, monkeypatch):
    loaded = []
    monkeypatch.setattr(plugins, "load", lambda interface, name: loaded.append(name) or Noting)
    for section in ({}, {"noting": None, "broken": False}, "no section"):
        assert track_config_type(section)(broken=None).model_dump() == {"broken": None, "noting": None}
    assert loaded == []
    track_config_type({"noting": "project"})(noting="project")
    assert loaded == ["noting"]


def test_a_client_that_is_missing_is_named(installed, monkeypatch):
    missing = Availability(ok=False, reason="noting is not installed; pip install noting")
    monkeypatch.setattr(Noting, "probe", lambda: missing)
    check_trackers(installed())
    with pytest.raises(
        ConfigError, match=r"^track.noting: noting is not installed; pip install noting, or rem"
    ):
        check_trackers(installed(noting="project"))


@pytest.mark.parametrize("where", ["open", "take step 2", "close"])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionError("no server\nRetried 5 times."), "ConnectionError: no server"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_tracker_that_fails_is_named_once_and_left_out(
    installed, tmp_path, monkeypatch, caplog, where, error, cause
):
    def act(self, doing):
        if doing == where:
            raise error

    monkeypatch.setattr(Noting, "act", act)
    (tracker,) = build_trackers(installed(noting="project"), RunDirectory(tmp_path))
    for step in range(4):
        tracker.log(step, {})
    tracker.close()
    tracker.close()
    assert tracker.failure == f"did not {where}: {cause}"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"track.noting='project': tracker of spec-tracker-noting 1.0 did not {where}: {cause}; the run goes on "
        "without it"
    )
    assert Noting.made[0].steps == {"open": [], "take step 2": [0, 1, 2]}.get(where, [0, 1, 2, 3, "closed"])


@pytest.mark.parametrize("where", ["open", "take step 2", "close"])
def test_a_tracker_that_hangs_holds_nobody_up(installed, tmp_path, monkeypatch, caplog, where):
    freed = threading.Event()
    monkeypatch.setattr(Noting, "act", lambda self, doing: doing == where and freed.wait(60))
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.2)
    (tracker,) = build_trackers(installed(noting="project"), RunDirectory(tmp_path))
    for step in range(4):
        tracker.log(step, {})
    tracker.close()
    freed.set()
    assert tracker.failure == "has not sent everything within 0 s of the end"
    assert len(caplog.records) == 1


def test_a_tracker_that_hangs_keeps_no_endless_queue(installed, tmp_path, monkeypatch):
    freed = threading.Event()
    monkeypatch.setattr(Noting, "act", lambda self, doing: freed.wait(60))
    monkeypatch.setattr(trackers, "_MOST_WAITING", 5)
    (tracker,) = build_trackers(installed(noting="project"), RunDirectory(tmp_path))
    for step in range(9):
        tracker.log(step, {})
    freed.set()
    tracker.close()
    assert tracker.failure == "has not taken 5 steps"
