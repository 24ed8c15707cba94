"""Which checkpoint a run begins with: ``train.resume_from``. Imports no torch: it comes before any start."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError
from spec_trainer.checkpoint.folder import META_FILE, check_whole, finished, step_folders, step_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)


def checkpoint_to_resume(root: Path, resume_from: str) -> Path | None:
    """Return a checkpoint that is whole, or None where a run has none yet; ArtifactError says what to do."""
    checkpoints = finished(root)
    _warn_of_unfinished(root, checkpoints)
    if resume_from == "previous":
        return _newest_whole(root, checkpoints[:-1])
    if resume_from != "latest":
        checkpoints = _up_to(root, checkpoints, resume_from)
    if not checkpoints:
        return None
    *earlier, chosen = checkpoints
    try:
        _check_usable(chosen)
    except ArtifactError as damage:
        raise ArtifactError(f"{damage}; {_way_out(chosen, earlier)}") from damage
    return chosen


def _check_usable(folder: Path) -> None:
    meta = check_whole(folder)
    if meta.step != step_of(folder):
        raise ArtifactError(f"{folder} is damaged: its {META_FILE} is that of step {meta.step}")


def _up_to(root: Path, checkpoints: list[Path], name: str) -> list[Path]:
    names = [folder.name for folder in checkpoints]
    if name not in names:
        raise ArtifactError(
            f"train.resume_from={name}: {root} has no such checkpoint, only {', '.join(names) or 'none'}"
        )
    return checkpoints[: names.index(name) + 1]


def _newest_whole(root: Path, earlier: Sequence[Path]) -> Path:
    for folder in reversed(earlier):
        try:
            _check_usable(folder)
        except ArtifactError as damage:
            logger.warning("%s; trying the one before", damage)
        else:
            return folder
    raise ArtifactError(
        f"train.resume_from=previous: {root} has no whole checkpoint before the newest; remove {root.parent} to "
        "start anew"
    )


def _way_out(damaged: Path, earlier: Sequence[Path]) -> str:
    if not earlier:
        return f"no earlier checkpoint is there: delete {damaged} to start anew"
    return f"go on from {earlier[-1].name} with --resume-from previous, or delete {damaged}"


def _warn_of_unfinished(root: Path, checkpoints: Sequence[Path]) -> None:
    for folder in step_folders(root):
        if folder not in checkpoints:
            logger.warning("%s has no meta.json: it is passed over, and written again at its step", folder)
