"""Trackers: services that take the scalars of each step besides metrics.jsonl, each imported when it is asked for."""

from __future__ import annotations

import importlib.util
import secrets
import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_trainer.disk import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_trainer.config import TrackConfig
    from spec_trainer.metrics import Tracker
    from spec_trainer.run_directory import RunDirectory


def check_trackers(config: TrackConfig) -> None:
    """Raise ConfigError if a tracker that the configuration asks for is not installed."""
    for name in _asked(config):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"track.{name}: {name} is not installed; pip install {name}, or remove the key")


def build_trackers(config: TrackConfig, directory: RunDirectory) -> list[Tracker]:
    """Return the trackers that the configuration asks for."""
    return [_TRACKERS[name](getattr(config, name), directory) for name in _asked(config)]


def _asked(config: TrackConfig) -> list[str]:
    return [name for name in _TRACKERS if getattr(config, name)]


class TensorBoardTracker:
    """Writes scalars into a folder for TensorBoard."""

    def __init__(self, _: bool, directory: RunDirectory) -> None:
        """Write event files into the run directory."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory.root / "tensorboard"))

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WandbTracker:
    """Sends scalars to Weights & Biases."""

    def __init__(self, project: str, directory: RunDirectory) -> None:
        """Log to ``project`` of Weights & Biases; its files lie in the run directory."""
        import wandb

        self._run = wandb.init(
            project=project,
            dir=str(directory.root),
            name=directory.root.resolve().name,
            id=_kept_id(directory, "wandb", lambda: secrets.token_hex(8)),
            resume="allow",
        )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


class MlflowTracker:
    """Sends scalars to MLflow, where its own variables say (``MLFLOW_TRACKING_URI``)."""

    def __init__(self, experiment: str, directory: RunDirectory) -> None:
        """Log to a run of ``experiment``, which is made where it is not there."""
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = directory.root.resolve().name
        self._run_id = _kept_id(directory, "mlflow", lambda: self._new_run(experiment, name))
        self._client.update_run(self._run_id, status="RUNNING")

    def _new_run(self, experiment: str, name: str) -> str:
        there = self._client.get_experiment_by_name(experiment)
        number = there.experiment_id if there else self._client.create_experiment(experiment)
        return self._client.create_run(number, run_name=name).info.run_id

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._run_id, [Metric(name, value, now_ms, step) for name, value in scalars.items()]
        )

    def close(self) -> None:
        """End the run there."""
        self._client.set_terminated(self._run_id)


class TrackioTracker:
    """Writes scalars for Trackio, on this host or where its own variables say."""

    def __init__(self, project: str, directory: RunDirectory) -> None:
        """Log to ``project``, under the run directory's name with an id."""
        import trackio

        number = _kept_id(directory, "trackio", lambda: secrets.token_hex(4))
        with redirect_stdout(sys.stderr):  # it says how to look at the run
            self._run = trackio.init(
                project=project,
                name=f"{directory.root.resolve().name}-{number}",
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """End the run there."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


_TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""Key of section ``track``, which is also the name of the package -> what logs there."""


def _kept_id(directory: RunDirectory, service: str, make: Callable[[], str]) -> str:
    """Return the run's id there, kept in its directory: a resumed run goes on in it, and no other one does."""
    file = directory.root / f".{service}-id"
    if not file.exists():
        write_atomically(file, make())
    return file.read_text()
