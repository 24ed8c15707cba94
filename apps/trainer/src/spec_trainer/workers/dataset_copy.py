"""Copy a run's tokenised dataset, in pieces, to a worker whose host cannot access the run directory."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from spec_core.errors import ConfigError, RunError
from spec_trainer.data.dataset import Dataset
from spec_trainer.data.store import DATASET_FILES, open_dataset
from spec_trainer.workers.protocol import DatasetPart, DatasetWanted, WorkerOrder

_PART_BYTES = 1 << 20


def sees_run_directory(order: WorkerOrder) -> bool:
    """Return whether this host can access the run directory.

    It can if the dataset folder, which is in the run directory, exists here.
    """
    return Path(order.dataset).is_dir()


def check_sees_run_directory(order: WorkerOrder) -> None:
    """Raise ConfigError if this worker's host cannot access the run directory, which the worker needs."""
    if not sees_run_directory(order):
        raise ConfigError(
            f"{order.name} needs {order.config['output']}, which its host {socket.gethostname()} does not see: have "
            "the launcher start it on the host of the run, or set output to a folder that both hosts mount"
        )


def run_dataset(order: WorkerOrder, ask: Callable[[DatasetWanted], DatasetPart]) -> Dataset:
    """Return the run's dataset, memory-mapped from the run directory or from a temporary copy.

    ``ask`` sends a request to the controller and returns the reply.
    """
    if sees_run_directory(order):
        return open_dataset(order.dataset)
    with TemporaryDirectory(prefix="spec-dataset-") as folder:
        for name in DATASET_FILES:
            with (Path(folder) / name).open("wb") as copy:
                start = 0
                while data := base64.b64decode(ask(DatasetWanted(name, start)).data):
                    start += copy.write(data)
        return open_dataset(folder)  # mapped files remain readable after the folder is removed


def read_part(dataset: Path, wanted: DatasetWanted) -> DatasetPart:
    """Return the controller's reply to ``wanted``: at most 1 MiB of a file from byte ``wanted.start`` on.

    The reply has no bytes at the end of the file.
    """
    if wanted.file not in DATASET_FILES:
        raise RunError(f"a worker asked for {wanted.file}, which is no file of the dataset")
    with (dataset / wanted.file).open("rb") as stream:
        stream.seek(wanted.start)
        return DatasetPart(base64.b64encode(stream.read(_PART_BYTES)).decode())
