"""CheckpointStore saves, loads and rotates the checkpoints of one run.

A step folder holds the strategy's state (model, optimizer, each process's generator), the resolved configuration and
``meta.json``. The data position and the learning rate are functions of the step, so nothing else is stored.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spec_core import foreign_errors
from spec_core.errors import ArtifactError
from spec_core.wording import shown
from spec_kit.sharding import SafetensorsFolder
from spec_kit.sharding.safetensors_folder import write_synced
from spec_trainer.base.disk import not_written, remove
from spec_trainer.configuration import read_resolved
from spec_trainer.training.checkpoint.folder import (
    BEST,
    CONFIG_FILE,
    META_FILE,
    STATE_FOLDER,
    CheckpointMeta,
    discard,
    finished,
    read_meta,
    scratch_folder,
    step_of,
)
from spec_trainer.training.checkpoint.rank_files import RankFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from spec_core import Strategy
    from spec_trainer.run.draft_trainer import DraftTrainer


def read_weights(strategy_type: type[Strategy], folder: Path) -> dict[str, Tensor]:
    """Return the draft's full tensors in a checkpoint, by their names in the draft's module.

    No process group is needed.
    """
    with _readable(folder):
        return strategy_type.read_weights(SafetensorsFolder(folder / STATE_FOLDER))


def check_strategy(strategy_type: type[Strategy], folder: Path) -> None:
    """Raise ArtifactError if another strategy wrote the checkpoint and ``strategy_type`` cannot read it."""
    with foreign_errors(ArtifactError, f"{folder / CONFIG_FILE} names no strategy"):
        written_by = read_resolved(folder / CONFIG_FILE)["strategy"]["name"]
    if written_by == strategy_type.name:
        return
    try:
        read_weights(strategy_type, folder)
    except ArtifactError as error:
        raise ArtifactError(
            f"{folder} was written by strategy {shown(written_by)}, and {strategy_type.name!r} cannot read it; set "
            "strategy.name to that, or choose another output"
        ) from error


class CheckpointStore:
    """Manages the checkpoints of one run. Every rank calls ``save`` and ``load``; rank 0 renames and rotates."""

    def __init__(self, root: Path, keep: int, group: ProcessGroup, sees: bool = True) -> None:
        """Prepare to keep the ``keep`` newest checkpoints in ``root``, and the best one. Collective.

        ``sees``: whether this rank can access rank 0's ``root``; if not, its ``root`` is a local folder.
        """
        self._root = root
        self._keep = keep
        self._group = group
        self._files = RankFiles(group, sees)
        self.newest: Path | None = None
        """Folder of the checkpoint that this process saved or loaded last."""

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self._root / f"step-{step}"

    def best(self) -> Path | None:
        """Return the checkpoint to which the link ``best`` points, or None if there is no such checkpoint."""
        link = self._root / BEST
        folder = link.resolve()
        inside = folder.parent == self._root.resolve()
        return folder if inside and (folder / META_FILE).is_file() else None

    def best_score(self, done_steps: int) -> float:
        """Return the acceptance length of the best checkpoint, or 0 if there is none, on every rank.

        A checkpoint that is damaged, or was saved after step ``done_steps``, is ignored.
        """
        return self._files.of_rank_0(self._own_best_score(done_steps))

    def _own_best_score(self, done_steps: int) -> float:
        best = self.best()
        if best is None:
            return 0.0
        try:
            meta = read_meta(best)
        except ArtifactError:  # it is damaged, which ``CommandCheckpoints`` has reported
            return 0.0
        return (meta.acceptance_length or 0.0) if meta.step <= done_steps else 0.0

    def save(self, trainer: DraftTrainer, meta: CheckpointMeta, config_text: str, best: bool = False) -> Path:
        """Save a checkpoint; with ``best``, set the link ``best`` to it. Return its folder. Collective.

        If this fails, earlier checkpoints are not affected. A hidden folder stays, which
        ``RunDirectory.remove_unfinished`` removes later, because other ranks may still be writing to it.
        """
        import torch.distributed as dist

        folder = self.folder(meta.step)
        if folder == self.newest:  # an evaluation at this step has saved it
            return folder
        scratch = scratch_folder(folder)
        rank = self._group.rank()
        with _writing(folder, rank):
            scratch.mkdir(exist_ok=True)  # not its parents: they may have been removed
            (scratch / STATE_FOLDER).mkdir(exist_ok=True)
            state = SafetensorsFolder(scratch / STATE_FOLDER)
            trainer.save(state)
        digests: list[dict[str, str]] = [{}] * self._group.size()
        dist.all_gather_object(digests, state.digests, group=self._group)
        with _writing(folder, rank):
            self._files.collect(scratch, [f"{STATE_FOLDER}/{name}" for name in state.digests])
        self._files.forget(scratch)
        if rank == 0:
            written = {f"{STATE_FOLDER}/{name}": digest for part in digests for name, digest in part.items()}
            with _writing(folder, rank):
                files = {CONFIG_FILE: write_synced(scratch / CONFIG_FILE, config_text), **written}
                write_synced(scratch / META_FILE, meta.model_copy(update={"files": files}).to_json())
                if best:
                    self._link_best(folder)
                discard(folder)  # an unfinished one, or one of a future that was given up
                scratch.rename(folder)
                _sync_folder(self._root)
            self._rotate(meta.step)
        # A barrier; dist.barrier itself would warn that it guesses the device.
        dist.all_gather_object(digests, {}, group=self._group)
        self.newest = folder
        return folder

    def load(self, trainer: DraftTrainer, folder: Path) -> CheckpointMeta:
        """Load a checkpoint, which any number of ranks may have saved; return its ``meta.json``. Collective.

        The caller must have checked that the folder is undamaged, once for all ranks.
        """
        self._files.spread(folder)
        meta = read_meta(folder)
        with _readable(folder):
            trainer.load(SafetensorsFolder(folder / STATE_FOLDER))
        self._files.forget(folder)
        self.newest = folder
        return meta

    def _link_best(self, folder: Path) -> None:
        """Let the link ``best`` point to a new checkpoint, before its ``folder`` gets its final name.

        The link is replaced atomically. If the command crashes before ``folder`` is renamed, the resumed run
        trains and evaluates this step again.
        """
        scratch = self._root / f".{BEST}"
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(folder.name)
        link = self._root / BEST
        if link.is_dir() and not link.is_symlink():  # somebody has copied the run without its links
            remove(link)
        scratch.replace(link)

    def _rotate(self, step: int) -> None:
        """Remove checkpoints up to ``step``, except the newest ones and the best; keep all later checkpoints."""
        best = self.best()
        for folder in [folder for folder in finished(self._root) if step_of(folder) <= step][: -self._keep]:
            if folder.resolve() != best:
                discard(folder)


@contextmanager
def _writing(folder: Path, rank: int) -> Iterator[None]:
    """Turn a failed write in the ``with`` block, such as on a full disk, into a RunError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise not_written(f"checkpoint {folder} (rank {rank})", folder.parent, error) from error


def _readable(folder: Path) -> AbstractContextManager[None]:
    """Turn a failed read in the ``with`` block into an ArtifactError."""
    return foreign_errors(ArtifactError, f"checkpoint {folder} cannot be read")


def _sync_folder(folder: Path) -> None:
    """Fsync a folder, which makes renames in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
