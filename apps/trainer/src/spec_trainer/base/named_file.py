"""Write a file that the user named, whatever it is: a new or a plain file, a link, a pipe or a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from spec_core.errors import ConfigError
from spec_trainer.base.disk import holds_files, not_written, write_atomically

_PAGE = b"<!doctype html>"
_OWN_OUTPUT = frozenset(
    [
        "/dev/stdout",
        "/dev/stderr",
        *(f"{folder}/{n}" for folder in ("/dev/fd", "/proc/self/fd") for n in (1, 2)),
    ]
)
"""They get tables and messages; if a shell has sent these to a file, opening it anew would overwrite them."""


def check_named_page(file: Path, flag: str) -> None:
    """Raise ConfigError if ``file``, the value of ``flag``, cannot get a page of HTML, or holds something else."""
    if str(file) in _OWN_OUTPUT:
        raise ConfigError(
            f"{flag}={file} is where this command prints; name a file, a pipe or another device"
        )
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag}={file}: its folder does not exist")
    in_place = not _is_replaced(file)
    possible = os.access(file if in_place else folder, os.W_OK) and (in_place or holds_files(folder))
    if file.is_dir() or not possible:
        raise ConfigError(f"{flag}={file} is not a file that can be written; name another")
    if file.is_file() and not _is_empty_or_page(file):
        raise ConfigError(f"{flag}={file} is there and is no report; name another file, or remove it first")


def write_named_file(file: Path, text: str) -> None:
    """Write a file atomically; write in place through a link, and into a pipe or a device, which stay as they are.

    Raise RunError if it cannot be written, or if it is a pipe that nobody reads.
    """
    if _is_replaced(file):
        write_atomically(file, text)
        return
    try:
        # O_NONBLOCK: a pipe without a reader is an error instead of a wait without an end.
        descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise not_written(file, file.parent, error) from error


def _is_replaced(file: Path) -> bool:
    """Return whether a file is new or plain, so that another file can take its place."""
    return not os.path.lexists(file) or stat.S_ISREG(file.lstat().st_mode)


def _is_empty_or_page(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_PAGE)).lower() in (b"", _PAGE)
