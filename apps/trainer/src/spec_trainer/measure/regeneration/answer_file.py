"""AnswerFile is the output file of ``regenerate``, to which whole lines are appended.

``FILE.jsonl.meta.json`` has the settings of the answers in ``FILE.jsonl``.
"""

from __future__ import annotations

import json
import mmap
import os
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from spec_core.errors import ArtifactError
from spec_core.foreign import foreign_errors, read_bytes
from spec_core.resource import Resource
from spec_trainer.base.disk import check_own, check_writable, lock_file, open_own, write_atomically
from spec_trainer.configuration.chat import meta_of_answers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT = "spec-trainer answers 1"

_CUT = b'"finish_reason": "length"'
"""Text in the line of a cut answer. It occurs nowhere else, because quotes within a JSON string are escaped."""


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
            self.next_row = _first_missing_row(path, self._file)
            """Index of the first row of the data that is not answered."""
            if self.next_row == 0:
                self._write_meta({})
            stack.pop_all()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append answers and fsync the file."""
        lines = [json.dumps(row, default=str) + "\n" for row in rows]
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def seal(self) -> dict[str, int]:
        """Write into ``.meta.json`` that all rows are answered; return the numbers of rows and of cut answers."""
        self._file.seek(0)
        counts = {"rows_written": 0, "rows_cut": 0}
        for line in self._file:
            counts["rows_written"] += 1
            counts["rows_cut"] += _CUT in line
        self._write_meta({**counts, "bytes": _size(self.path)})
        return counts

    def close(self) -> None:
        """Close and unlock the file."""
        self._file.close()

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


def _first_missing_row(path: Path, file: IO[bytes]) -> int:
    """Return the index of the row after the last answer.

    An incomplete last line, which a crash may have left, is removed.
    """
    size = os.fstat(file.fileno()).st_size
    if not size:
        return 0
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        last = content[content.rfind(b"\n", 0, max(0, end - 1)) + 1 : end]
    file.truncate(end)
    problem = f"output {path}: its last line is no answer; remove it, or choose another file"
    with foreign_errors(ArtifactError, problem):
        return int(json.loads(last)["row"]) + 1 if last else 0
