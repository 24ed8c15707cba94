"""Find the rows of data that a path names: a file, a folder of files, or a data set of the hub."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from spec_core import foreign_errors
from spec_core.errors import DataError
from spec_core.foreign import check_regular
from spec_core.wording import shown
from spec_trainer.base.hub import hub_problem, is_hub_name
from spec_trainer.configuration.chat import ChatConfig, chat_of_answers, meta_of_answers
from spec_trainer.data.row_files import READABLE, ROWS, DataRow, rows_of_file, without_nulls

_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Metadata files of the hub and of ``datasets``, which hold no rows."""
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


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


def check_apart(path: str, output: Path) -> None:
    """Raise DataError if ``output`` lies in the data folder ``path``, whose later readers would take it for data."""
    folder = os.path.expanduser(path)
    if os.path.isdir(folder):
        below = Path(os.path.relpath(os.path.realpath(output), os.path.realpath(folder)))
        if not _is_hidden(below):  # or above it: ..
            raise DataError(
                f"output {output} is in the data folder '{path}', whose files are all data; put it elsewhere"
            )


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
    return next((suffix for suffix in READABLE if file.name.endswith(suffix)), None)


def _raise(error: OSError) -> None:
    raise error


def _file_rows(file: Path) -> Iterator[DataRow]:
    kind = _kind(file)
    if kind is None:
        raise DataError(f"data file '{file}' is of no known kind: expected {_EXPECTED}; {ROWS}")
    check_regular(file, DataError)
    with _readable(str(file)):
        yield from rows_of_file(file, kind)


def read_hub(name: str, split: str, config: str | None = None, file: str | None = None) -> Iterator[DataRow]:
    """Yield the rows of a data set of the hub, or of one ``file`` of it. Raise DataError if it cannot be read."""
    with _readable(f"{name}:{split}"):
        for number, row in enumerate(_load_hub(name, config, split, file), start=1):
            yield DataRow(f"{name}:{split}:{number}", without_nulls(row))


def _load_hub(name: str, config: str | None, split: str, file: str | None = None) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"data '{name}:{split}' is on the hub, which needs datasets: pip install 'spec-trainer[hub]'"
        )
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
    return load_dataset(name, config, split=split, data_files=file)


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


_KINDS = ".jsonl, .json, .parquet"
_EXPECTED = f"a {_KINDS} file (or .jsonl.gz), a folder of them"
