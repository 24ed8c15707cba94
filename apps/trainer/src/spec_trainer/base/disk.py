"""Create, lock, atomically write and remove the folders and files of one command."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO

from spec_core.errors import ArtifactError, RunError, UsageError
from spec_core.foreign import cause

_RANDOM_DIGITS = 16
"""Hexadecimal digits of a random name."""
_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def new_folder(parent: Path, prefix: str) -> Path:
    """Make a folder with a random name and the umask's permissions; ``tempfile`` would make it private."""
    folder = parent / f"{prefix}{secrets.token_hex(_RANDOM_DIGITS // 2)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise not_written(folder, parent, error) from error
    return folder


@contextmanager
def scratch_beside(output: Path) -> Generator[Path]:
    """Make a hidden folder beside ``output``, and remove it after the ``with`` block, unless it was renamed.

    Folders that killed commands with the same output have left are removed, too. A command that is alive holds a
    lock on its folder; on a file system without locks every folder stays.
    """
    for left in output.parent.glob(f".{escape(output.name)}-{'[0-9a-f]' * _RANDOM_DIGITS}"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    scratch = new_folder(output.parent, f".{output.name}-")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        with suppress(OSError):
            stack.enter_context(_locked(scratch))
        yield scratch


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Lock a folder. Raise OSError if it is no folder, or locked by another process, or cannot be locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the cache folder that all commands of this user share; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec-trainer"


def holds_files(folder: Path) -> bool:
    """Return whether files can be made in ``folder``: not in /proc, whose permissions let root write."""
    return os.statvfs(folder).f_blocks > 0


def check_writable(folder: Path, what: str = "output") -> None:
    """Raise ArtifactError if ``folder`` cannot be created or written to; create nothing.

    ``what`` names the folder in the error message.
    """
    path = folder.absolute()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # whether it can be created depends on the nearest folder that exists
    except OSError as error:  # a name that is too long, or a loop of links
        raise ArtifactError(f"{what} {folder} cannot be created: {error.strerror}") from error
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ArtifactError(f"{what} {folder}: {there} is not a folder that can be written to")
    if not holds_files(there):
        raise ArtifactError(f"{what} {folder}: {there} is of a file system that holds no files")


@contextmanager
def locked_folder(folder: Path, activity: str, results: str) -> Generator[None]:
    """Make ``folder``, and lock it against other commands during the ``with`` block.

    The lock is also released if this process is killed.

    After a UsageError, such as a target that the engine cannot load, a folder that was empty before is emptied
    again, unless a path in it matches the glob pattern ``results``. Raise ArtifactError if the folder cannot be
    made, or if another command holds the lock; ``activity`` (such as "a run") names that command in the message.
    """
    made = not os.path.exists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"output {folder} cannot be created: {error.strerror}") from error
    fresh = not os.listdir(folder)
    with open_own(folder / ".lock") as file:
        lock_file(file, f"output {folder} is in use by {activity} that is under way")
        try:
            yield
        except UsageError:
            if fresh and not any(folder.glob(results)):
                for path in folder.iterdir():
                    remove(path)
                if made:
                    folder.rmdir()
            raise


def check_own(path: Path, is_folder: bool = False) -> None:
    """Raise ArtifactError if ``path`` is a link or no regular file (with ``is_folder``: no folder)."""
    expected, name = (stat.S_ISDIR, "folder") if is_folder else (stat.S_ISREG, "file")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # whoever works in that folder has removed it meanwhile
        return
    if not expected(mode):
        found = "a link" if stat.S_ISLNK(mode) else f"no {name}"
        raise ArtifactError(
            f"{path} is {found}: expected a {name} of its own; move it away, or choose another folder"
        )


def open_own(file: Path) -> IO[bytes]:
    """Open a file for appending, and create it if needed. Raise ArtifactError if it is no regular file."""
    if os.path.lexists(file):
        check_own(file)
    # Between the two lines it may become a link or a pipe: neither is followed or waited for.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(file, flags, 0o666), "a+b")


def lock_file(file: IO[str] | IO[bytes], problem: str) -> None:
    """Lock an open file until it is closed. Raise ArtifactError(``problem``) if it is locked already."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ArtifactError(problem) from error


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_atomically(file: Path, text: str) -> None:
    """Write a file so that readers see the old or the new content. Raise RunError if the disk is full."""
    with replacing(file) as stream:
        stream.write(text.encode())


@contextmanager
def replacing(file: Path) -> Generator[IO[bytes]]:
    """Yield a new file, which replaces ``file`` at the end of the ``with`` block, but not after an error.

    Raise RunError if the disk is full.
    """
    scratch = file.with_name(f".{file.name.lstrip('.')}.{secrets.token_hex(8)}")
    try:
        with scratch.open("xb") as stream:  # mode x follows no link that another user has put there
            yield stream
        scratch.replace(file)
    except OSError as error:
        raise not_written(file, file.parent, error) from error
    finally:
        scratch.unlink(missing_ok=True)


def follow_umask(file: Path) -> None:
    """Give a file the read and write permissions of its folder; safetensors makes files private."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def not_written(what: object, path: Path, error: BaseException) -> RunError:
    """Return the RunError to raise if ``what`` could not be written to ``path``, because of ``error``."""
    message = f"{what} was not written: {cause(error)}"
    remedy = _REMEDIES.get(_errno(error) or 0)
    if remedy is None:
        return RunError(message)
    there = next(above for above in (path, *path.absolute().parents) if above.is_dir())
    free_mb = shutil.disk_usage(there).free >> 20
    return RunError(
        f"{message} ({free_mb} MB are free in {there}); {remedy}, then run the same command again"
    )


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    foreign = re.search(r"\(os error (\d+)\)", str(error))  # the form in which safetensors writes it
    return int(foreign[1]) if foreign else None
