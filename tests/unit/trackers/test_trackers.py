"""The contract of trackers by the real clients, which write into files here."""

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spec_core import Tracker, plugins
from spec_core.errors import ConfigError
from spec_testing import TrackerSuite


def tensorboard_steps(folder: Path) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = set()
    for file in folder.rglob("events.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        steps |= {event.step for event in events.Scalars("accuracy/0")}
    return steps


def mlflow_steps(folder: Path) -> set[int]:
    lines = [line for file in folder.rglob("accuracy/0") for line in file.read_text().splitlines()]
    return {int(line.split()[2]) for line in lines}


def trackio_steps(folder: Path) -> set[int]:
    (file,) = Path(os.environ["TRACKIO_DIR"]).glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    return {step for step, metrics in rows if "accuracy/0" in json.loads(metrics)}


def wandb_steps(folder: Path) -> set[int]:
    files = [file.read_bytes() for file in folder.rglob("*.wandb")]
    return {int(step) for file in files for step in re.findall(rb"_step.{0,6}?([12])", file, re.DOTALL)}


STEPS: dict[str, Callable[[Path], set[int]]] = {
    "tensorboard": tensorboard_steps,
    "mlflow": mlflow_steps,
    "trackio": trackio_steps,
    "wandb": wandb_steps,
}


@pytest.fixture(scope="module", autouse=True)
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trackio reads its variable when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        yield


@pytest.mark.filterwarnings("ignore")  # theirs
class TestTrackers(TrackerSuite):
    @pytest.fixture(params=STEPS)
    def tracker(self, request, tmp_path, monkeypatch) -> type[Tracker]:
        pytest.importorskip(request.param, reason=f"{request.param} is not installed")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
        self.name = request.param
        return plugins.load(Tracker, request.param)

    @pytest.fixture
    def value(self, tracker):
        return True if tracker.Value is bool else "project"

    def steps_of(self, folder: Path) -> set[int]:
        return STEPS[self.name](folder)

    def test_a_client_that_is_not_installed_is_named(self, tracker, monkeypatch):
        monkeypatch.setitem(sys.modules, tracker.name, None)
        assert tracker.probe().reason == f"{tracker.name} is not installed; pip install {tracker.name}"


def test_tensorboard_writes_nowhere_but_into_the_run_directory(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    run.mkdir()
    (run / "tensorboard").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="tensorboard is a link"):
        plugins.load(Tracker, "tensorboard")(True, run)
    assert not list(elsewhere.iterdir())
