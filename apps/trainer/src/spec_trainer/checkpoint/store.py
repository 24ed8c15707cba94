"""Checkpoints: ``checkpoints/step-N``, written whole or not at all, rotated, with a link to the best one.

A step folder holds the sharded state (torch.distributed.checkpoint: model with its vocabulary mapping, float32
masters, optimizer), each rank's generator state, the resolved configuration and ``meta.json``. The data position
and the learning rate are functions of the step, so N is all of the rest.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from spec_core import DraftTrainer

_BEST = "best"
_STEP = re.compile(r"step-\d+")


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """``meta.json`` of a step folder."""

    step: int
    """Optimizer steps done."""
    identity: str
    target_digest: str
    acceptance_length: float | None = None
    """Held-out, simulated; None if it was not evaluated at this step."""

    def to_json(self) -> str:
        return json.dumps(self.__dict__, indent=2) + "\n"


def read_meta(folder: Path) -> CheckpointMeta:
    """Raises ArtifactError if the folder is no checkpoint."""
    file = folder / "meta.json"
    if not file.is_file() or not (folder / "state" / ".metadata").is_file():
        raise ArtifactError(
            f"{folder} is not a checkpoint: expected a step-N folder with meta.json and state/"
        )
    try:
        return CheckpointMeta(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{file} is damaged: {error}") from error


def read_model_state(folder: Path) -> dict[str, Tensor]:
    """The draft's full tensors, under its module's names."""
    prefix = "model."
    return {key.removeprefix(prefix): value for key, value in read_tensors(folder, prefix).items()}


def read_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """All full tensors whose name begins with ``prefix``, read by one process without any group: ``model.…`` and
    ``optimizer.…``."""
    import torch
    from torch.distributed import checkpoint as dcp

    read_meta(folder)
    reader = dcp.FileSystemReader(folder / "state")
    with _readable(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")  # that is what is asked for
        state = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(entry, dcp.metadata.TensorStorageMetadata)
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


class CheckpointStore:
    """All checkpoints of one run. Every rank calls ``save`` and ``load``; rank 0 publishes and rotates."""

    def __init__(self, root: Path, keep: int, group: ProcessGroup) -> None:
        self._root = root
        self._keep = keep
        self._group = group

    def latest(self) -> Path | None:
        return max(self._steps(), key=_step_of, default=None)

    def best(self) -> Path | None:
        link = self._root / _BEST
        return link.resolve() if link.exists() else None

    def save(self, trainer: DraftTrainer, meta: CheckpointMeta, config_text: str, best: bool = False) -> Path:
        """Collective. A failure leaves every earlier checkpoint as it was. ``best``: so far."""
        import torch.distributed as dist
        from torch.distributed import checkpoint as dcp

        folder = self._root / f"step-{meta.step}"
        if folder.exists():  # saved by the previous incarnation of this run, or by an evaluation at this step
            return folder
        scratch = self._root / f".step-{meta.step}"
        rank = self._group.rank()
        with _whole_or_not(folder, scratch, rank):
            scratch.mkdir(exist_ok=True)  # not its parents: they may have been removed
            (scratch / "state").mkdir(exist_ok=True)
            writer = dcp.FileSystemWriter(scratch / "state", sync_files=True)
            dcp.save(trainer.state_dict(), storage_writer=writer, process_group=self._group)
            _save_generator(scratch / f"generator-{rank}.pt")
        dist.barrier(self._group)
        if rank == 0:
            with _whole_or_not(folder, scratch, rank):
                (scratch / "meta.json").write_text(meta.to_json())
                (scratch / "config.yaml").write_text(config_text)
                if best:
                    self._link_best(folder)
                scratch.rename(folder)
                _sync_folder(self._root)
            self._rotate()
        dist.barrier(self._group)
        return folder

    def load(self, trainer: DraftTrainer, folder: Path) -> CheckpointMeta:
        """Collective. Any number of ranks; a rank that did not exist then keeps its fresh generator."""
        from torch.distributed import checkpoint as dcp

        meta = read_meta(folder)
        state = trainer.state_dict()
        with _readable(folder):
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "state"), process_group=self._group)
            _load_generator(folder / f"generator-{self._group.rank()}.pt")
        trainer.load_state_dict(state)
        return meta

    def _steps(self) -> list[Path]:
        named = [folder for folder in self._root.glob("step-*") if _STEP.fullmatch(folder.name)]
        return sorted((folder for folder in named if (folder / "meta.json").is_file()), key=_step_of)

    def _link_best(self, folder: Path) -> None:
        """Swapped in one rename, before there is the folder: after a crash in between, the step is evaluated anew."""
        scratch = self._root / f".{_BEST}"
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(folder.name)
        scratch.replace(self._root / _BEST)

    def _rotate(self) -> None:
        best = self.best()
        for folder in self._steps()[: -self._keep]:
            if folder.resolve() != best:
                # Renamed first: a crash in the middle of the removal leaves no half checkpoint under a good name.
                doomed = folder.with_name(f".{folder.name}.old")
                folder.rename(doomed)
                shutil.rmtree(doomed)


@contextmanager
def _whole_or_not(folder: Path, scratch: Path, rank: int) -> Iterator[None]:
    """A failure to write, for want of space say, becomes a RunError and leaves nothing."""
    from torch.distributed import checkpoint as dcp

    try:
        yield
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        there = next(above for above in folder.parents if above.exists())
        free_mb = shutil.disk_usage(there).free >> 20
        shutil.rmtree(scratch, ignore_errors=True)
        raise RunError(
            f"checkpoint {folder} was not written (rank {rank}): {_root_cause(error)} "
            f"({free_mb} MB are free in {there})"
        ) from error


_UNREADABLE = (OSError, RuntimeError, MemoryError, pickle.UnpicklingError, EOFError, AttributeError, ImportError,
               LookupError, TypeError, ValueError, OverflowError)  # fmt: skip
"""What damaged files raise: pickle promises nothing."""


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A failure to read becomes an ArtifactError."""
    from torch.distributed import checkpoint as dcp

    try:
        yield
    except (*_UNREADABLE, dcp.api.CheckpointException) as error:
        raise ArtifactError(f"checkpoint {folder} cannot be read: {_root_cause(error)}") from error


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _save_generator(file: Path) -> None:
    import torch

    torch.save(torch.get_rng_state(), file)


def _load_generator(file: Path) -> None:
    import torch

    if file.is_file():
        torch.set_rng_state(torch.load(file, weights_only=True))


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root_cause(error: BaseException) -> str:
    """DCP wraps what happened on each rank; the person wants the disk's own words."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}".splitlines()[0]
