"""Trackers get every step, a resumed run goes on where it was, and nobody needs what nobody asked for."""

from __future__ import annotations

import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest

from spec_core.errors import ConfigError
from spec_trainer.config import TrackConfig
from spec_trainer.run_directory import RunDirectory
from spec_trainer.trackers import WandbTracker, build_trackers, check_trackers


@pytest.fixture
def directory(tmp_path, monkeypatch) -> RunDirectory:
    """Of a run, with every tracker set to write below it."""
    (tmp_path / "run").mkdir()
    for name, value in {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": f"{tmp_path}/trackio",
    }.items():
        monkeypatch.setenv(name, value)
    return RunDirectory(tmp_path / "run")


def steps_kept(directory: RunDirectory, tracker: str) -> int:
    """Of the metric accuracy/0; TensorBoard and W&B in a file each, because each step is of a command of its own."""
    root = directory.root.parent
    if tracker == "mlflow":
        return sum(len(file.read_text().splitlines()) for file in root.rglob("accuracy/0"))
    if tracker == "trackio":
        (file,) = root.glob("trackio/*.db")
        with sqlite3.connect(file) as database:
            rows = database.execute("select metrics from metrics").fetchall()
        return sum("accuracy/0" in json.loads(metrics) for (metrics,) in rows)
    files = {"tensorboard": "run/tensorboard/events.*", "wandb": "run/wandb/offline-run-*/*.wandb"}
    return sum(b"accuracy/0" in file.read_bytes() for file in root.glob(files[tracker]))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_the_real_tracker_takes_steps_and_goes_on_in_a_resumed_run(tracker, directory, capsys):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed")
    config = TrackConfig(**{tracker: True if tracker == "tensorboard" else "project"})
    check_trackers(config)
    for step in (1, 2):
        (built,) = build_trackers(config, directory)
        built.log(step, {"loss": 2.0, "accuracy/0": 0.5})
        built.close()
    # Offline, W&B names its files by the second: both commands may have the same one.
    assert steps_kept(directory, tracker) in ((1, 2) if tracker == "wandb" else (2,))
    assert capsys.readouterr().out == ""
    kept = {file.name: file.read_text() for file in directory.root.glob(".*-id")}
    assert set(kept) == (set() if tracker == "tensorboard" else {f".{tracker}-id"})


def test_a_resumed_run_goes_on_in_weights_and_biases_and_another_of_its_name_does_not(tmp_path, monkeypatch):
    begun: list[tuple[str, str]] = []

    def init(**options):
        begun.append((options["name"], options["id"]))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for parent in ("one", "one", "other"):
        (tmp_path / parent / "run").mkdir(parents=True, exist_ok=True)
        WandbTracker("project", RunDirectory(tmp_path / parent / "run"))
    (name, first), again, (same_name, other) = begun
    assert again == (name, first)
    assert name == same_name == "run"
    assert first != other


def test_trackers_that_nobody_asked_for_need_not_be_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_trackers(TrackConfig())
    with pytest.raises(ConfigError, match=r"track.wandb: wandb is not installed; pip install wandb"):
        check_trackers(TrackConfig(wandb="project"))
