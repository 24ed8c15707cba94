"""metrics.jsonl and the optional trackers: one record per optimizer step, floats in full."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol, Self

from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from spec_trainer.config import TrackConfig
    from spec_trainer.run_directory import RunDirectory


class Tracker(Protocol):
    """Where scalars go besides metrics.jsonl."""

    def log(self, step: int, scalars: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends records to metrics.jsonl. Opened at step N it first drops what a crashed run wrote after N, so that
    the file holds every step exactly once."""

    def __init__(self, file: Path, done_steps: int, trackers: list[Tracker]) -> None:
        kept = [line for line in _lines(file) if json.loads(line)["step"] <= done_steps]
        file.write_text("".join(kept))
        self._file = file.open("a", buffering=1)
        self._trackers = trackers

    def log(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        scalars = dict(_scalars(record))
        for tracker in self._trackers:
            tracker.log(record["step"], scalars)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._file.close)
            for tracker in self._trackers:
                stack.callback(tracker.close)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(file)]


def build_trackers(config: TrackConfig, directory: RunDirectory) -> list[Tracker]:
    """ConfigError if a tracker that the configuration asks for is not installed."""
    trackers: list[Tracker] = []
    try:
        if config.tensorboard:
            trackers.append(TensorBoardTracker(directory.root / "tensorboard"))
        if config.wandb is not None:
            trackers.append(WandbTracker(config.wandb, directory))
    except ImportError as error:
        raise ConfigError(f"a tracker is not installed ({error.name}); pip install {error.name}") from error
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
