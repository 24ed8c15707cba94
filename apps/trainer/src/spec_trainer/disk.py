"""Files that nobody else foresees or reads, and what a failed write means and asks for, in one line."""

from __future__ import annotations

import errno
import re
import secrets
import shutil
from typing import TYPE_CHECKING

from spec_core.errors import RunError
from spec_core.foreign import cause

if TYPE_CHECKING:
    from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def new_folder(parent: Path, prefix: str) -> Path:
    """Make a folder of an unforeseeable name, open to whom the umask says; tempfile's are for their owner alone."""
    folder = parent / f"{prefix}{secrets.token_hex(8)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise not_written(folder, parent, error) from error
    return folder


def follow_umask(file: Path) -> None:
    """Open a file to those who may read its new folder: safetensors' own are for their owner alone."""
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
