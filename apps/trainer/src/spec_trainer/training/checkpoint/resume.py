"""Choose the checkpoint from which a run resumes or restarts. This module imports no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from spec_core.errors import ArtifactError
from spec_trainer.training.checkpoint.folder import (
    BEST,
    META_FILE,
    check_whole,
    finished,
    read_meta,
    step_folders,
    step_of,
)

logger = logging.getLogger(__name__)


class CommandCheckpoints:
    """Chooses the checkpoints from which a command resumes, and restarts after a failure."""

    def __init__(self, root: Path, resume_from: str, identity: str) -> None:
        """Choose ``first`` as ``checkpoint_to_resume`` does, and note which checkpoints exist already."""
        self._root = root
        self._identity = identity
        _warn_of_best(root)
        self._found = {folder: _version_of(folder) for folder in finished(root)}
        self.first = checkpoint_to_resume(root, resume_from, identity)
        """Checkpoint from which the command resumes; None if it begins at step 0."""

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint that this command has written.

        If it has written none, return the checkpoint from which the command resumed, or None.
        """
        written = [
            folder for folder in finished(self._root) if self._found.get(folder) != _version_of(folder)
        ]
        own = _newest_whole(written, self._identity)
        if own is not None or self.first is None:
            return own
        return checkpoint_to_resume(self._root, self.first.name, self._identity)


def checkpoint_to_resume(root: Path, resume_from: str, identity: str) -> Path | None:
    """Return the undamaged checkpoint that ``resume_from`` names, or None if the run has none yet.

    If the checkpoint is damaged or missing, raise ArtifactError that says what to do.
    """
    checkpoints = finished(root)
    _warn_of_unfinished(root, checkpoints)
    if resume_from == "previous":
        return _previous(root, checkpoints[:-1], identity)
    if resume_from != "latest":
        checkpoints = _up_to(root, checkpoints, resume_from)
    if not checkpoints:
        return None
    *earlier, chosen = checkpoints
    try:
        _check(chosen, identity)
    except ArtifactError as damage:
        raise ArtifactError(f"{damage}; {_way_out(chosen, earlier, resume_from)}") from damage
    return chosen


def _check(folder: Path, identity: str) -> None:
    """Raise ArtifactError if a checkpoint is damaged, or belongs to another run or to another step."""
    meta = check_whole(folder)
    if meta.step != step_of(folder):
        raise ArtifactError(f"{folder} holds the checkpoint of step {meta.step}")
    if meta.identity != identity:
        raise ArtifactError(f"{folder} is a checkpoint of another run")


def _version_of(folder: Path) -> tuple[int, int]:
    """Return the inode and mtime of a checkpoint's ``meta.json``, which change if it is written again."""
    status = (folder / META_FILE).stat()
    return status.st_ino, status.st_mtime_ns


def _up_to(root: Path, checkpoints: list[Path], name: str) -> list[Path]:
    names = [folder.name for folder in checkpoints]
    if name not in names:
        raise ArtifactError(
            f"train.resume_from={name}: {root} has no such checkpoint, only {', '.join(names) or 'none'}"
        )
    return checkpoints[: names.index(name) + 1]


def _previous(root: Path, earlier: Sequence[Path], identity: str) -> Path:
    found = _newest_whole(earlier, identity)
    if found is None:
        raise ArtifactError(
            f"train.resume_from=previous: {root} has no whole checkpoint before the newest; remove {root.parent} to "
            "start anew"
        )
    return found


def _newest_whole(checkpoints: Sequence[Path], identity: str) -> Path | None:
    for folder in reversed(checkpoints):
        try:
            _check(folder, identity)
        except ArtifactError as damage:
            logger.warning("%s; trying the one before", damage)
        else:
            return folder
    return None


def _way_out(damaged: Path, earlier: Sequence[Path], resume_from: str) -> str:
    if not earlier:
        return f"no earlier checkpoint is there: delete {damaged} to start anew"
    word = "previous" if resume_from == "latest" else earlier[-1].name
    return f"go on from {earlier[-1].name} with --resume-from {word}, or delete {damaged}"


def _warn_of_best(root: Path) -> None:
    link = root / BEST
    if not os.path.lexists(link):
        return
    try:
        read_meta(link)
    except ArtifactError as damage:
        logger.warning("%s; no best checkpoint is known before the next evaluation", damage)


def _warn_of_unfinished(root: Path, checkpoints: Sequence[Path]) -> None:
    for folder in step_folders(root):
        if folder not in checkpoints:
            logger.warning("%s has no meta.json: it is passed over, and written again at its step", folder)
