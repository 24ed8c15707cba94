"""Copy a target's folder: its own regular files, and nothing that lies elsewhere."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from spec_core.errors import TargetError


def copy_target(target: Path, output: Path) -> None:
    """Copy the files of the folder ``target`` into ``output``, a new folder. A link becomes a file.

    Raise TargetError, before anything is written, if ``output`` lies in ``target``, or if ``target`` has a pipe, a
    device, a link to a folder or a link out of it, or if the disk of ``output`` has too little room for the copy.
    Links of the hub's cache into its folder ``blobs`` are followed.
    """
    check_outside(target, output)
    files = list(_files(target, target))
    _check_room(target, files, output)
    for file in files:
        copied = output / file.relative_to(target)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)


def check_outside(target: Path, output: Path) -> None:
    """Raise TargetError if ``output`` lies in the folder ``target``."""
    if output.resolve().is_relative_to(target.resolve()):
        raise TargetError(
            f"output {output} lies in the target's folder {target}; choose a folder outside of it"
        )


def _check_room(target: Path, files: Sequence[Path], output: Path) -> None:
    """Raise TargetError if the disk has no room for a copy, in which sparse files take their whole size."""
    there = next(folder for folder in output.absolute().parents if folder.is_dir())
    sizes = {file: file.stat().st_size for file in files}
    needed = sum(sizes.values())
    free = shutil.disk_usage(there).free
    if needed > free:
        largest = max(sizes, key=sizes.__getitem__)
        raise TargetError(
            f"a copy of target {target} takes {needed} bytes ({largest} {sizes[largest]}), and {free} are free where "
            "it is to lie; make room, or choose an output on another disk"
        )


def _files(target: Path, folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files(target, path)
        else:
            _check_own_file(target, path)
            yield path


def _check_own_file(target: Path, path: Path) -> None:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise TargetError(f"{path} cannot be copied: it is a link to nothing; remove it") from error
    if not any(real.is_relative_to(home.resolve()) for home in _homes(target)):
        raise TargetError(
            f"{path} cannot be copied: it is a link out of the target's folder, to {real}; remove it, or put the "
            "file itself there"
        )
    if not stat.S_ISREG(real.stat().st_mode):
        raise TargetError(f"{path} cannot be copied: it is no regular file; remove it")


def _homes(target: Path) -> Iterator[Path]:
    """Yield the folders in which a target's files may lie: the hub's cache links a snapshot's files to its blobs."""
    yield target
    if target.parent.name == "snapshots":
        yield target.parent.parent / "blobs"
