"""AnswerFile is the output file of ``regenerate``, to which whole lines are appended, and which is sorted at the end.

``FILE.jsonl.meta.json`` has the settings of the answers in ``FILE.jsonl``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from spec_core import foreign_errors
from spec_core.errors import ArtifactError
from spec_core.foreign import read_bytes
from spec_core.resource import Resource
from spec_trainer.base.disk import (
    check_own,
    check_writable,
    lock_file,
    not_written,
    open_own,
    replacing,
    write_atomically,
)
from spec_trainer.configuration.chat import meta_of_answers

FORMAT = "spec-trainer answers 1"

_ROW = re.compile(rb'(?P<cut>"finish_reason": "length", )?"row": (?P<row>\d+)}\n')
"""The end of an answer's line: whether it was cut, and the index of its row. Earlier keys are the data's."""
_LONGEST_END = 70
"""Largest length of such an end."""
_SYNC_EVERY_S = 5.0
"""Seconds from one fsync to the next; a failure of the machine loses at most the answers of this time."""


class AnswerFile(Resource):
    """The output file of ``spec-trainer regenerate``, locked against other commands."""

    def __init__(self, path: Path, settings: Mapping[str, Any], about: Mapping[str, str]) -> None:
        """Open an existing file to continue it, or create one.

        ``settings`` must equal the settings of an existing file. ``about`` is only information for people, and may
        differ.

        Raise ArtifactError if ``path`` is no answer file, has other settings or cannot be written, or if another
        command has locked it.
        """
        check_answer_file(path, settings)
        self.path = path
        self._made = {"format": FORMAT, **about, "settings": settings}
        with ExitStack() as stack:
            self._file = stack.enter_context(open_own(path))
            lock_file(self._file, f"output {path} is being written by another command")
            self.complete = _size(path) > 0 and _meta(path)["result"].get("bytes") == _size(path)
            """Whether all rows of the data are answered."""
            self.rows = {number for number, _, _ in self._lines()}
            """Indices of the rows of the data that are answered."""
            if not self.rows:
                self._write_meta({})
            self._synced_s = time.monotonic()
            stack.pop_all()

    def append(self, row: Mapping[str, Any]) -> None:
        """Append an answer, which survives if this process is killed; ``row`` is its last key.

        Raise RunError if the disk is full.
        """
        try:
            self._file.write(json.dumps(row, default=str).encode() + b"\n")
            self._file.flush()
            if time.monotonic() - self._synced_s >= _SYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._synced_s = time.monotonic()
        except OSError as error:
            raise not_written(f"an answer to {self.path}", self.path, error) from error
        self.rows.add(row["row"])

    def seal(self, *, drop_cut: bool = False) -> dict[str, int]:
        """Sort the answers by row, and write into ``.meta.json`` that all rows are answered.

        Return the numbers of rows and of cut answers. ``drop_cut``: leave rows with a cut answer out.
        """
        lines = list(self._lines())
        kept = sorted(line for line in lines if not (drop_cut and line[2]))
        if kept != lines:
            with replacing(self.path) as stream:
                for _, place, _ in kept:
                    self._file.seek(place)
                    stream.write(self._file.readline())
                stream.flush()
                os.fsync(stream.fileno())
        counts = {"rows_written": len(kept), "rows_cut": sum(is_cut for _, _, is_cut in kept)}
        self._write_meta({**counts, "bytes": _size(self.path)})
        return counts

    def close(self) -> None:
        """Close and unlock the file."""
        with suppress(OSError):  # the rest of an answer that ``append`` could not write
            self._file.close()

    def _lines(self) -> Iterator[tuple[int, int, bool]]:
        """Yield each answer's row, its place in the file and whether it is cut.

        An incomplete last line, which a crash may have left, is removed. Raise ArtifactError for a line that is no
        answer.
        """
        self._file.seek(0)
        place = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(place)
                return
            if (found := _ROW.search(line, max(0, len(line) - _LONGEST_END))) is None:
                raise ArtifactError(
                    f"output {self.path}: line {number} is no answer; remove it, or choose another file"
                )
            yield int(found["row"]), place, found["cut"] is not None
            place += len(line)

    def _write_meta(self, result: Mapping[str, int]) -> None:
        write_atomically(
            meta_of_answers(self.path), json.dumps({**self._made, "result": result}, indent=2) + "\n"
        )


def check_answer_file(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ArtifactError if ``path`` is no answer file, has other settings, or cannot be written.

    Nothing is created.
    """
    if path.is_dir():
        raise ArtifactError(f"output {path} is a folder; give a file")
    for own in (path, meta_of_answers(path)):
        check_own(own)
    check_writable(path.parent)
    if not path.parent.is_dir():
        raise ArtifactError(f"output {path}: there is no folder {path.parent}; make it first")
    if _size(path) == 0:
        return
    there = _meta(path)["settings"]
    differences = [
        f"{name} {there.get(name)} there, {settings.get(name)} here"
        for name in {**there, **settings}
        if there.get(name) != settings.get(name)
    ]
    if differences:
        raise ArtifactError(
            f"output {path} was made with other settings ({'; '.join(differences)}); give the same ones, or "
            "choose another file"
        )


def _meta(path: Path) -> dict[str, dict[str, Any]]:
    """Return the keys ``settings`` and ``result`` of the meta file. Raise ArtifactError if it is damaged."""
    file = meta_of_answers(path)
    if not file.exists():
        raise ArtifactError(
            f"output {path} exists and has no {file.name}: it is not this command's; choose another"
        )
    with foreign_errors(ArtifactError, f"{file} is damaged; choose another output"):
        document = json.loads(read_bytes(file, ArtifactError))
        return {key: dict(document[key]) for key in ("settings", "result")}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
