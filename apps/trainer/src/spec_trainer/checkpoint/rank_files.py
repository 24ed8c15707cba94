"""RankFiles: files of a checkpoint between rank 0 and ranks on hosts that do not see the run directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch.distributed import ProcessGroup

T = TypeVar("T")

_PIECE_BYTES = 16 << 20
"""Most that a rank holds of a file which travels."""
_Piece = tuple[str, int, bytes]
"""Name of the file, position, content."""


class RankFiles:
    """Collective, in pieces of bounded size; where every rank sees the run directory, nothing travels."""

    def __init__(self, group: ProcessGroup, sees: bool) -> None:
        """``sees``: whether this rank sees the run directory; rank 0 does."""
        import torch.distributed as dist

        self._group, self._sees = group, sees
        everyones = [True] * group.size()
        dist.all_gather_object(everyones, sees, group=group)
        self._apart = not all(everyones)

    def of_rank_0(self, value: T) -> T:
        """Return the value that rank 0 has."""
        import torch.distributed as dist

        box = [value]
        if self._apart:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def collect(self, folder: Path, names: Iterable[str]) -> None:
        """Bring files of ranks that do not see rank 0's folder there; each has ``names`` in a folder of its own."""
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
        """Bring all files below rank 0's folder to ranks that do not see it, until they call ``forget``."""
        if not self._apart:
            return
        names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
        mine = _pieces(folder, names if self._group.rank() == 0 else ())
        while (piece := self.of_rank_0(next(mine, None))) is not None:
            if not self._sees:
                _write(folder, piece)

    def forget(self, folder: Path) -> None:
        """Remove what only this rank has of a folder."""
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
