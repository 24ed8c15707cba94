"""metrics.jsonl and the optional trackers: one record per optimizer step, floats in full."""

from __future__ import annotations

import importlib.util
import json
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spec_core.errors import ConfigError
from spec_trainer.disk import not_written
from spec_trainer.run_directory import write_atomically

if TYPE_CHECKING:
    from spec_trainer.config import TrackConfig
    from spec_trainer.run_directory import RunDirectory


class Tracker(Protocol):
    """Where scalars go besides metrics.jsonl."""

    def log(self, step: int, scalars: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class StepLines(AbstractContextManager["StepLines"]):
    """A file with one JSON record per step. Opened at step N it first drops what a crashed run wrote after N, so that
    the file holds every step exactly once."""

    def __init__(self, file: Path, done_steps: int) -> None:
        drop_after(file, done_steps)
        self._file = file.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            file = Path(self._file.name)
            raise not_written(file, file.parent, error) from error

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # of a line that ``write`` has told of
            self._file.close()


def drop_after(file: Path, step: int) -> None:
    """Removes the records of later steps."""
    if file.exists():
        write_atomically(file, "".join(line for line in _lines(file) if json.loads(line)["step"] <= step))


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """metrics.jsonl and the trackers of one run."""

    def __init__(self, file: Path, done_steps: int, trackers: list[Tracker]) -> None:
        self._lines = StepLines(file, done_steps)
        self._trackers = trackers

    def log(self, record: dict[str, Any]) -> None:
        self._lines.write(record)
        scalars = dict(_scalars(record))
        for tracker in self._trackers:
            tracker.log(record["step"], scalars)

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._lines)
            for tracker in self._trackers:
                stack.callback(tracker.close)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(file)]


def check_trackers(config: TrackConfig) -> None:
    """ConfigError if a tracker that the configuration asks for is not installed."""
    for name, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb is not None)):
        if wanted and importlib.util.find_spec(name) is None:
            raise ConfigError(f"track.{name}: {name} is not installed; pip install {name}, or remove the key")


def build_trackers(config: TrackConfig, directory: RunDirectory) -> list[Tracker]:
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoardTracker(directory.root / "tensorboard"))
    if config.wandb is not None:
        trackers.append(WandbTracker(config.wandb, directory))
    return trackers


class TensorBoardTracker:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    def __init__(self, project: str, directory: RunDirectory) -> None:
        import wandb

        # The run's id is kept in its directory, so that a resumed run continues the same W&B run.
        self._run = wandb.init(
            project=project, dir=str(directory.root), id=directory.root.resolve().name, resume="allow"
        )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def _lines(file: Path) -> list[str]:
    """Whole lines only: a crash may have cut the last one short."""
    if not file.exists():
        return []
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Numbers as they are; a list (per draft position) as name/0, name/1, …"""
    flat: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, list):
            flat += [(f"{name}/{index}", item) for index, item in enumerate(value)]
        elif isinstance(value, int | float) and name != "step":
            flat.append((name, value))
    return flat
