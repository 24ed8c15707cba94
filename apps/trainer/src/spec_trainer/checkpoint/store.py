"""CheckpointStore: saves, loads and rotates the checkpoints of one run; and full tensors of one, without a run.

A step folder holds the sharded state (model with its vocabulary mapping, float32 masters, optimizer, each rank's
generator), the resolved configuration and ``meta.json``. The data position and the learning rate are functions of
the step, so N is all of the rest.
"""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError
from spec_core.foreign import foreign_errors
from spec_trainer.checkpoint.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    META_FILE,
    CheckpointMeta,
    finished,
    read_meta,
    step_of,
    write_synced,
)
from spec_trainer.disk import not_written

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import StorageReader

    from spec_core import DraftTrainer

_BEST = "best"
_GENERATORS = "generator"


def read_model_state(folder: Path) -> dict[str, Tensor]:
    """The draft's full tensors, under its module's names."""
    prefix = "model."
    return {key.removeprefix(prefix): value for key, value in read_tensors(folder, prefix).items()}


def read_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """All full tensors whose name begins with ``prefix``, read by one process without any group: ``model.…`` and
    ``optimizer.…``."""
    import torch
    from torch.distributed import checkpoint as dcp

    reader = _reader(folder)
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
        self.newest: Path | None = None
        """What this process has saved or loaded last."""

    def folder(self, step: int) -> Path:
        return self._root / f"step-{step}"

    def best(self) -> Path | None:
        """The checkpoint that the link names, if it is one."""
        link = self._root / _BEST
        return link.resolve() if (link / META_FILE).is_file() else None

    def save(self, trainer: DraftTrainer, meta: CheckpointMeta, config_text: str, best: bool = False) -> Path:
        """Collective. A failure leaves every earlier checkpoint as it was. ``best``: so far."""
        import torch.distributed as dist
        from torch.distributed import checkpoint as dcp

        from spec_trainer.checkpoint.storage import SafetensorsWriter

        folder = self.folder(meta.step)
        if folder == self.newest:  # an evaluation at this step has saved it
            return folder
        scratch = self._root / f".{folder.name}"
        rank = self._group.rank()
        with _whole_or_not(folder, scratch, rank):
            scratch.mkdir(exist_ok=True)  # not its parents: they may have been removed
            (scratch / "state").mkdir(exist_ok=True)
            writer = SafetensorsWriter(scratch, rank)
            dcp.save(
                trainer.state_dict() | _generator(rank), storage_writer=writer, process_group=self._group
            )
        dist.barrier(self._group)
        if rank == 0:
            with _whole_or_not(folder, scratch, rank):
                files = {CONFIG_FILE: write_synced(scratch / CONFIG_FILE, config_text), **writer.digests}
                write_synced(scratch / META_FILE, meta.model_copy(update={"files": files}).to_json())
                if best:
                    self._link_best(folder)
                _discard(folder)  # an unfinished one, or one of a future that was given up
                scratch.rename(folder)
                _sync_folder(self._root)
            self._rotate(meta.step)
        dist.barrier(self._group)
        self.newest = folder
        return folder

    def load(self, trainer: DraftTrainer, folder: Path) -> CheckpointMeta:
        """Collective. Any number of ranks; a rank that did not exist then keeps its fresh generator.

        Whether the folder is whole is for the caller to check, once for all ranks.
        """
        from torch.distributed import checkpoint as dcp

        reader, rank = _reader(folder), self._group.rank()
        state, generator = trainer.state_dict(), _generator(rank)
        with _readable(folder):
            wanted = state | (generator if _holds_generator(reader, rank) else {})
            dcp.load(wanted, storage_reader=reader, process_group=self._group)
        trainer.load_state_dict(state)
        _set_generator(reader, generator, rank)
        self.newest = folder
        return read_meta(folder)

    def _link_best(self, folder: Path) -> None:
        """Swapped in one rename, before there is the folder: after a crash in between, the step is evaluated anew."""
        scratch = self._root / f".{_BEST}"
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(folder.name)
        scratch.replace(self._root / _BEST)

    def _rotate(self, step: int) -> None:
        """Later ones than ``step`` are of a future that was given up: they count for nothing."""
        best = self.best()
        for folder in [folder for folder in finished(self._root) if step_of(folder) <= step][: -self._keep]:
            if folder.resolve() != best:
                _discard(folder)


def _discard(folder: Path) -> None:
    """Renamed first: a crash in the middle of the removal leaves no half checkpoint under a good name."""
    if folder.exists():
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
        failure = not_written(f"checkpoint {folder} (rank {rank})", folder.parent, _root_cause(error))
        shutil.rmtree(scratch, ignore_errors=True)
        raise failure from error


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A failure to read becomes an ArtifactError, in the words of its cause."""
    from torch.distributed import checkpoint as dcp

    with foreign_errors(ArtifactError, f"checkpoint {folder} cannot be read"):
        try:
            yield
        except dcp.api.CheckpointException as error:
            raise _root_cause(error) from None


def _reader(folder: Path) -> StorageReader:
    read_meta(folder)
    if (folder / INDEX_FILE).is_file():
        from spec_trainer.checkpoint.storage import SafetensorsReader

        return SafetensorsReader(folder)
    from spec_trainer.checkpoint.pickled import PickledReader

    return PickledReader(folder)


def _generator(rank: int) -> dict[str, dict[str, Tensor]]:
    """This rank's generator, as a part of the state that only this rank has."""
    import torch

    return {_GENERATORS: {f"rank-{rank}": torch.get_rng_state()}}


def _holds_generator(reader: StorageReader, rank: int) -> bool:
    return f"{_GENERATORS}.rank-{rank}" in reader.read_metadata().state_dict_metadata


def _set_generator(reader: StorageReader, loaded: dict[str, dict[str, Tensor]], rank: int) -> None:
    import torch

    from spec_trainer.checkpoint.pickled import PickledReader

    pickled = reader.generator(rank) if isinstance(reader, PickledReader) else None
    torch.set_rng_state(loaded[_GENERATORS][f"rank-{rank}"] if pickled is None else pickled)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root_cause(error: BaseException) -> BaseException:
    """DCP wraps what happened on each rank; the person wants the disk's own words."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error
