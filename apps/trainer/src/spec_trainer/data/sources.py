"""Where rows come from: JSON, JSONL and Parquet files, folders of them, and hub ids."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.config import first_line
from spec_core.errors import DataError
from spec_trainer.data.errors import BadRow
from spec_trainer.data.json_array import json_elements

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


@dataclass(frozen=True)
class Row:
    where: str
    """``file:line`` for people: the line in JSON and JSONL, the row's number from 1 elsewhere."""
    content: object
    """The decoded row, or the BadRow that it is."""


def read_rows(path: str) -> Iterator[Row]:
    """Rows of ``path`` in a fixed order: a folder's files by name, a file's rows as they stand.

    Raises DataError where a source as a whole cannot be read.
    """
    if not path:  # to pathlib, the working directory
        raise DataError(f"data is empty: expected {_EXPECTED}, or a hub id owner/name[:split]")
    file = Path(path)
    if file.is_dir():
        for member in _data_files(file):
            yield from _file_rows(member)
    elif file.exists():
        yield from _file_rows(file)
    elif file.suffix not in _READERS and (hub := _HUB_ID.fullmatch(path)):
        yield from _hub_rows(hub[1], hub[2] or "train")
    else:
        raise DataError(f"data {path!r} does not exist: expected {_EXPECTED}, or a hub id owner/name[:split]")


def _data_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.suffix in _READERS and file.is_file())
    if not files:
        raise DataError(f"data folder '{folder}' holds no {', '.join(_READERS)} file")
    return files


def _file_rows(file: Path) -> Iterator[Row]:
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise DataError(f"data file '{file}' is of no known kind: expected {_EXPECTED}")
    with _readable(str(file)):
        yield from reader(file)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Row(f"{file}:{number}", _decode_line(line))


def _decode_line(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return BadRow("not JSON", f"{error.msg} at column {error.colno}")
    except (UnicodeDecodeError, RecursionError) as error:
        return BadRow("not JSON", first_line(error))


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        for line, element in json_elements(file.read_text("utf-8-sig")):
            yield Row(f"{file}:{line}", element)
    except json.JSONDecodeError as error:
        raise DataError(f'{file}:{error.lineno}: {error.msg} (a list of rows or {{"data": [...]}})') from None
    except RecursionError as error:
        raise DataError(f"{file}: nested too deeply to be read") from error


def _load(*names: str, **options: Any) -> Any:
    from datasets import load_dataset
    from datasets.utils import logging as datasets_logging

    # What goes wrong comes back as our one line.
    datasets_logging.set_verbosity(datasets_logging.CRITICAL)
    return load_dataset(*names, **options)


def _parquet_rows(file: Path) -> Iterator[Row]:
    # Streaming reads the file where it lies; otherwise a copy of it would be written to the user's cache.
    rows = _load("parquet", data_files=str(file), split="train", streaming=True)
    for number, row in enumerate(rows, start=1):
        yield Row(f"{file}:{number}", row)


def _hub_rows(name: str, split: str) -> Iterator[Row]:
    with _readable(f"{name}:{split}"):
        for number, row in enumerate(_load(name, split=split), start=1):
            yield Row(f"{name}:{split}:{number}", row)


@contextmanager
def _readable(source: str) -> Generator[None]:
    """Turns the failures of the file system, the hub and the Parquet reader into one line."""
    try:
        yield
    except DataError:
        raise
    # datasets: ConnectionError and FileNotFoundError for the hub, ValueError for splits and damaged Parquet files.
    except (OSError, ValueError) as error:
        raise DataError(f"data '{source}' cannot be read: {first_line(error)}") from error


_READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
_EXPECTED = f"a {', '.join(_READERS)} file, a folder of them"
