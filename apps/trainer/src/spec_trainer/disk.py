"""Folders and files of one command: made where no other user foresees them, locked, and the errors of a full disk."""

from __future__ import annotations

import errno
import fcntl
import re
import secrets
import shutil
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from spec_core.errors import ArtifactError, RunError
from spec_core.foreign import cause

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def new_folder(parent: Path, prefix: str) -> Path:
    """Make a folder with a random name and the permissions that the umask gives; tempfile's are private."""
    folder = parent / f"{prefix}{secrets.token_hex(8)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise not_written(folder, parent, error) from error
    return folder


@contextmanager
def locked_folder(folder: Path, activity: str) -> Iterator[None]:
    """Make ``folder`` and keep other commands out of it during the ``with`` block, however this process ends.

    Raise ArtifactError where it cannot be made, or where ``activity`` (such as "a run") is under way in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"output {folder} cannot be created: {error.strerror}") from error
    with (folder / ".lock").open("a") as file:
        lock_file(file, f"output {folder} is in use by {activity} that is under way")
        yield


def lock_file(file: IO[str] | IO[bytes], problem: str) -> None:
    """Lock an open file until it is closed. Raise ArtifactError with ``problem`` where another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ArtifactError(problem) from error


def follow_umask(file: Path) -> None:
    """Give a file the permissions of its new folder, without execution; safetensors makes its files private."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def not_written(what: object, place: Path, error: BaseException) -> RunError:
    """Return the error for ``what``, which was to lie in or at ``place``."""
    message = f"{what} was not written: {cause(error)}"
    remedy = _REMEDIES.get(_errno(error) or 0)
    if remedy is None:
        return RunError(message)
    there = next(above for above in (place, *place.absolute().parents) if above.is_dir())
    free_mb = shutil.disk_usage(there).free >> 20
    return RunError(
        f"{message} ({free_mb} MB are free in {there}); {remedy}, then run the same command again"
    )


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    foreign = re.search(r"\(os error (\d+)\)", str(error))  # safetensors'
    return int(foreign[1]) if foreign else None
