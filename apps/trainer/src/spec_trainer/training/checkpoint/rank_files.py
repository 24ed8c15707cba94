"""RankFiles copies checkpoint files between rank 0 and ranks that cannot access the run directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch.distributed import ProcessGroup

T = TypeVar("T")

_PIECE_BYTES = 16 << 20
"""Largest number of bytes of a file that a rank holds in memory while the file is copied."""
_Piece = tuple[str, int, bytes]
"""Name of the file, byte offset, content."""


class RankFiles:
    """Copies files between ranks, a limited number of bytes at a time. All ranks must make each call.

    If every rank can access the run directory, nothing is copied.
    """

    def __init__(self, group: ProcessGroup, sees: bool) -> None:
        """Find out which ranks can access the run directory.

        ``sees``: whether this rank can access it; rank 0 always can.
        """
        import torch.distributed as dist

        self._group = group
        self._sees = sees
        everyones = [True] * group.size()
        dist.all_gather_object(everyones, sees, group=group)
        self._apart = not all(everyones)

    def of_rank_0(self, value: T) -> T:
        """Return rank 0's ``value`` on every rank."""
        import torch.distributed as dist

        box = [value]
        if self._apart:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def collect(self, folder: Path, names: Iterable[str]) -> None:
        """Copy the files ``names`` of each rank that cannot access rank 0's ``folder`` into that folder."""
        import torch.distributed as dist

        mine = iter(()) if self._sees else _pieces(folder, names)
        everyones: list[_Piece | None] = [None] * self._group.size()
        while self._apart:
            dist.all_gather_object(everyones, next(mine, None), group=self._group)
            if not any(everyones):
                return
            for piece in filter(None, everyones if self._group.rank() == 0 else ()):
                _write(folder, piece)

    def spread(self, folder: Path) -> None:
        """Copy all files of rank 0's folder to the ranks that cannot access it; ``forget`` removes the copies."""
        if not self._apart:
            return
        names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
        mine = _pieces(folder, names if self._group.rank() == 0 else ())
        while (piece := self.of_rank_0(next(mine, None))) is not None:
            if not self._sees:
                _write(folder, piece)

    def forget(self, folder: Path) -> None:
        """Remove this rank's copy of a folder, if ``spread`` has made one."""
        if not self._sees:
            shutil.rmtree(folder, ignore_errors=True)


def _pieces(folder: Path, names: Iterable[str]) -> Iterator[_Piece]:
    for name in names:
        position = 0
        with (folder / name).open("rb") as stream:
            while data := stream.read(_PIECE_BYTES):
                yield name, position, data
                position += len(data)


def _write(folder: Path, piece: _Piece) -> None:
    name, position, data = piece
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("r+b" if position else "wb") as stream:
        stream.seek(position)
        stream.write(data)
