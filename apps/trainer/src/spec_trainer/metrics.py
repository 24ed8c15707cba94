"""Write metrics.jsonl and the optional trackers: one row per optimizer step, floats in full."""

from __future__ import annotations

import importlib.util
import json
import secrets
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spec_core.errors import ConfigError
from spec_trainer.disk import not_written, write_atomically

if TYPE_CHECKING:
    from spec_trainer.config import TrackConfig
    from spec_trainer.run_directory import RunDirectory


class Tracker(Protocol):
    """A service that takes scalars besides metrics.jsonl."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""
        ...

    def close(self) -> None:
        """Write what is buffered and end."""
        ...


class StepLines(AbstractContextManager["StepLines"]):
    """A file with one JSON row per step.

    Opened at step N, it first drops the rows that a crashed run wrote after N, so that it holds every step once.
    """

    def __init__(self, file: Path, done_steps: int) -> None:
        """Open ``file``, cut back to the first ``done_steps`` steps."""
        drop_after(file, done_steps)
        self._file = file.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        """Write a row. Raise RunError where the disk is full."""
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            file = Path(self._file.name)
            raise not_written(file, file.parent, error) from error

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        with suppress(OSError):  # the disk is full, and ``write`` has raised it
            self._file.close()


def drop_after(file: Path, step: int) -> None:
    """Remove the rows of later steps."""
    if file.exists():
        write_atomically(file, "".join(line for line in _lines(file) if json.loads(line)["step"] <= step))


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """metrics.jsonl and the trackers of one run."""

    def __init__(self, file: Path, done_steps: int, trackers: list[Tracker]) -> None:
        """Write to ``file``, cut back to ``done_steps`` steps, and to ``trackers``."""
        self._lines = StepLines(file, done_steps)
        self._trackers = trackers

    def log(self, row: dict[str, Any]) -> None:
        """Write a row, and give its scalars to the trackers."""
        self._lines.write(row)
        scalars = dict(_scalars(row))
        for tracker in self._trackers:
            tracker.log(row["step"], scalars)

    def __exit__(self, *exc: object) -> None:
        """Close the file and the trackers."""
        with ExitStack() as stack:
            stack.enter_context(self._lines)
            for tracker in self._trackers:
                stack.callback(tracker.close)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return every row of metrics.jsonl."""
    return [json.loads(line) for line in _lines(file)]


def check_trackers(config: TrackConfig) -> None:
    """Raise ConfigError if a tracker that the configuration asks for is not installed."""
    for name, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb is not None)):
        if wanted and importlib.util.find_spec(name) is None:
            raise ConfigError(f"track.{name}: {name} is not installed; pip install {name}, or remove the key")


def build_trackers(config: TrackConfig, directory: RunDirectory) -> list[Tracker]:
    """Return the trackers that the configuration asks for."""
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoardTracker(directory.root / "tensorboard"))
    if config.wandb is not None:
        trackers.append(WandbTracker(config.wandb, directory))
    return trackers


class TensorBoardTracker:
    """Writes scalars into a folder for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Write event files into ``folder``."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

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

        # The run's id is kept in its directory: a resumed run continues the same W&B run, and no other one does.
        file = directory.root / ".wandb-id"
        if not file.exists():
            write_atomically(file, secrets.token_hex(8))
        name = directory.root.resolve().name
        self._run = wandb.init(
            project=project, dir=str(directory.root), name=name, id=file.read_text(), resume="allow"
        )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


def _lines(file: Path) -> list[str]:
    """Return the whole lines of a file: a crash may have cut the last one short."""
    if not file.exists():
        return []
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _scalars(row: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the numbers of a row by name; a list (one per draft position) becomes name/0, name/1, …."""
    flat: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, list):
            flat += [(f"{name}/{index}", item) for index, item in enumerate(value)]
        elif isinstance(value, int | float) and name != "step":
            flat.append((name, value))
    return flat
