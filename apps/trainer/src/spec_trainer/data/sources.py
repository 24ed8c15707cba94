"""Read rows from JSON, JSONL and Parquet files, folders of such files, and data sets of the hub."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.errors import DataError
from spec_core.foreign import cause, check_regular, foreign_errors, read_bytes
from spec_core.wording import shown
from spec_trainer.base.hub import hub_problem, is_hub_name
from spec_trainer.configuration.chat import chat_of_answers, meta_of_answers
from spec_trainer.data.errors import BadRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from spec_trainer.configuration.chat import ChatConfig

_LINE_BYTES = 16 << 20
"""Largest number of bytes of one JSONL row, enough for some millions of tokens. As Python lists they take 20 times as
much."""
_JSON_BYTES = 1 << 30
"""Largest number of bytes of a .json file, which is read as a whole; .jsonl and .parquet files may have any size."""
_PARQUET_ROWS = 256
_AS_UTF8 = "save the file as UTF-8, such as by iconv -f UTF-16 -t UTF-8"
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Metadata files of the hub and of ``datasets``, which hold no rows."""
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


@dataclass(frozen=True)
class DataRow:
    """One row of the data, not yet checked."""

    where: str
    """``file:number``: the line number in JSONL, else the row's number, counted from 1."""
    content: object
    """The decoded row, or a BadRow if it cannot be decoded."""


def read_rows(path: str) -> Iterator[DataRow]:
    """Yield the rows of ``path`` in a fixed order: files of a folder by name, rows in file order.

    Raise DataError if a source as a whole cannot be read.
    """
    source = _source(path)
    yield from read_files(source) if isinstance(source, list) else read_hub(*source)


def source_files(path: str) -> list[Path]:
    """Return the files that ``read_rows`` reads; for a hub id, the files in the hub's cache.

    Raise DataError if ``path`` cannot be read.
    """
    source = _source(path)
    if not isinstance(source, list):
        name, split = source
        with _readable(f"{name}:{split}"):
            source = [Path(part["filename"]) for part in _load_hub(name, None, split).cache_files]
    for file in source:
        check_regular(file, DataError)
    return source


def _source(path: str) -> list[Path] | tuple[str, str]:
    """Return the files of ``path``, or the name and the split of a data set of the hub."""
    if not path:  # to pathlib, the working directory
        raise DataError(f"data is empty: expected {_EXPECTED}, or a hub id owner/name[:split]")
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        return data_files(file)
    if os.path.exists(file):
        return [file]
    if _kind(file) is None and (hub := _HUB_ID.fullmatch(path)) and is_hub_name(hub[1]):
        return hub[1], hub[2] or "train"
    raise DataError(
        f"data {shown(path)} does not exist: expected {_EXPECTED}, or a hub id owner/name[:split]"
    )


def read_files(files: Iterable[Path]) -> Iterator[DataRow]:
    """Yield the rows of several files."""
    for file in files:
        yield from _file_rows(file)


def check_answers(path: str, chat: ChatConfig) -> None:
    """Raise ConfigError if ``regenerate`` rendered a file of ``path`` with other settings than ``chat``."""
    source = Path(path)
    for file in data_files(source) if path and source.is_dir() else [source]:
        made = chat_of_answers(file)
        if made is not None:
            chat.check_same(made, f"data '{file}'")


def data_files(folder: Path) -> list[Path]:
    """Return the data files below ``folder``, sorted by path, without hidden ones (leading dot).

    Raise DataError if there is none.
    """
    paths = (Path(source) / name for source, _, names in os.walk(folder, onerror=_raise) for name in names)
    with _readable(str(folder)):
        files = sorted(path for path in paths if _is_data(path) and not _is_hidden(path.relative_to(folder)))
    if not files:
        raise DataError(f"data folder '{folder}' holds no {_KINDS} file")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_data(file: Path) -> bool:
    answers = file.with_name(file.name.removesuffix(".meta.json"))
    describes_another = answers != file and meta_of_answers(answers) == file and answers.exists()
    describes = describes_another or file.name in _DESCRIPTIONS
    return _kind(file) is not None and file.is_file() and not describes


def _kind(file: Path) -> str | None:
    """Return the suffix that decides how a data file is read; None if the file is no data file."""
    return next((suffix for suffix in _READERS if file.name.endswith(suffix)), None)


def _raise(error: OSError) -> None:
    raise error


def _file_rows(file: Path) -> Iterator[DataRow]:
    kind = _kind(file)
    if kind is None:
        raise DataError(f"data file '{file}' is of no known kind: expected {_EXPECTED}; {_ROWS}")
    check_regular(file, DataError)
    with _readable(str(file)):
        _check_content(file, kind)
        yield from _READERS[kind](file)


def _check_content(file: Path, kind: str) -> None:
    """Raise DataError if a data file is compressed or Parquet, and its suffix does not say so."""
    with file.open("rb") as stream:
        start = stream.read(4)
    for magic, suffix in _MAGIC.items():
        if start.startswith(magic) and kind != suffix:
            raise DataError(f"data file '{file}' has the content of a {suffix} file; give it that suffix")


def _jsonl_rows(file: Path) -> Iterator[DataRow]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(_LINE_BYTES + 1)
            if len(line) > _LINE_BYTES:
                raise DataError(
                    f"{file}:{number}: the line has more than {_LINE_BYTES} bytes; cut the row into several"
                )
            if not line:
                return
            if line.strip():
                yield DataRow(f"{file}:{number}", _decode_line(line))


def _decode_line(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return BadRow("not JSON", f"{error.msg} at column {error.colno}; {_ROWS}")
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", f"{error.reason} at byte {error.start}; {_AS_UTF8}")
    except (ValueError, RecursionError) as error:  # too many digits, nested too deeply
        return BadRow("not JSON", cause(error))


def _json_rows(file: Path) -> Iterator[DataRow]:
    try:
        text = read_bytes(file, DataError, _JSON_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason} at byte {error.start}; {_AS_UTF8}") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # a row in each line
            yield from _jsonl_rows(file)
            return
        raise DataError(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
    rows = document.get("data") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(
            f'{file}: expected a list of rows, {{"data": [...]}}, or a row in each of several lines'
        )
    for number, row in enumerate(rows, start=1):
        yield DataRow(f"{file}:{number}", row)


def _parquet_rows(file: Path) -> Iterator[DataRow]:
    from pyarrow import OSFile, parquet

    # pyarrow would take some names for addresses of remote stores.
    with OSFile(str(file)) as source, parquet.ParquetFile(source) as table:
        number = 0
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield DataRow(f"{file}:{number}", _without_nulls(row))


def _without_nulls(value: object) -> object:
    """Return a value of a Parquet table without null fields.

    A table gives each row the fields of all rows; a field that a row did not have is null.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and isinstance(
        next((part for part in value if part is not None), None), dict | list
    ):
        return [_without_nulls(part) for part in value]
    return value


def read_hub(name: str, split: str, config: str | None = None) -> Iterator[DataRow]:
    """Yield the rows of a data set of the hub. Raise DataError if it cannot be read."""
    with _readable(f"{name}:{split}"):
        for number, row in enumerate(_load_hub(name, config, split), start=1):
            yield DataRow(f"{name}:{split}:{number}", _without_nulls(row))


def _load_hub(name: str, config: str | None, split: str) -> Any:
    from datasets import load_dataset
    from datasets.utils import logging as datasets_logging

    if os.path.lexists(name):  # which the library would read in place of the hub's
        raise DataError(f"the working directory has a {name} beside the hub's; work in another one")
    # Its failures become one line of error; its own logging would repeat them.
    datasets_logging.set_verbosity(datasets_logging.CRITICAL)
    if (problem := hub_problem(name, "dataset")) and not _is_cached(name):
        raise DataError(
            f"data '{name}:{split}' cannot be read: there is no such file or folder, and {problem}"
        )
    return load_dataset(name, config, split=split)


def _is_cached(name: str) -> bool:
    """Return whether a data set of the hub is in the cache of ``datasets``."""
    from datasets.load import CachedDatasetModuleFactory

    try:
        CachedDatasetModuleFactory(name).get_module()
    except FileNotFoundError:
        return False
    return True


def _readable(source: str) -> AbstractContextManager[None]:
    """Turn errors in the ``with`` block from the file system, the hub or Parquet into a DataError.

    Its message has one line.
    """
    return foreign_errors(DataError, f"data '{source}' cannot be read")


_READERS = {".jsonl": _jsonl_rows, ".jsonl.gz": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
_MAGIC = {b"\x1f\x8b": ".jsonl.gz", b"PAR1": ".parquet"}
READABLE = tuple(_READERS)
"""Suffixes of the files that ``read_rows`` reads."""
_KINDS = ".jsonl, .json, .parquet"
_ROWS = "a .jsonl file has an object in each line, a file of one JSON array is named .json"
_EXPECTED = f"a {_KINDS} file (or .jsonl.gz), a folder of them"
