"""MlflowTracker sends scalars to MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from spec_core import Tracker
from spec_core.records import Availability
from spec_trackers.client import client_installed, stored_run_id


class MlflowTracker(Tracker):
    """Sends scalars to the MLflow server that MLflow's environment variables name (``MLFLOW_TRACKING_URI``)."""

    name: ClassVar[str] = "mlflow"
    api_version: ClassVar[int] = 1
    description: ClassVar[str] = "MLflow experiment name; the server is that of MLFLOW_TRACKING_URI."

    @classmethod
    def probe(cls) -> Availability:
        """Return whether mlflow is installed."""
        return client_installed("mlflow")

    def __init__(self, value: str, folder: Path) -> None:
        """Log to a run of the experiment called ``value``; create the experiment if it does not exist."""
        from mlflow import MlflowClient

        super().__init__(value, folder)
        self._client = MlflowClient()
        self._run_id = stored_run_id(folder, "mlflow", lambda: self._new_run(value, folder.resolve().name))
        self._client.update_run(self._run_id, status="RUNNING")

    def _new_run(self, experiment: str, name: str) -> str:
        there = self._client.get_experiment_by_name(experiment)
        number = there.experiment_id if there else self._client.create_experiment(experiment)
        return self._client.create_run(number, run_name=name).info.run_id

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the scalars of a training step."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._run_id, [Metric(name, value, now_ms, step) for name, value in scalars.items()]
        )

    def close(self) -> None:
        """End the run at MLflow."""
        self._client.set_terminated(self._run_id)
