"""Read the rows of one file: JSON lines, also compressed, a list in JSON, or Parquet."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import DataError
from spec_core.foreign import cause, read_bytes
from spec_core.wording import counted
from spec_trainer.data.errors import BadRow
from spec_trainer.data.kernel_limits import memory_limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyarrow import RecordBatch

_LINE_BYTES = 16 << 20
"""Largest number of bytes of one JSONL row, enough for some millions of tokens. As Python lists they take 20 times as
much."""
_UNPACKED_BYTES = 64 << 20
"""Number of bytes that any .jsonl.gz or .parquet file may hold; a larger one at most ``_MOST_PACKED`` times its own
size."""
_MOST_PACKED = 100
_EMPTY_LINES = 1 << 20
"""Largest number of lines without a row in a .jsonl file."""
_JSON_BYTES = 1 << 30
"""Largest number of bytes of a .json file, which is read as a whole; .jsonl and .parquet files may have any size."""
_BATCH_ROWS = 32
"""Number of Parquet rows that are decoded together."""
_BATCH_BYTES = 1 << 30
"""Number of bytes that the decoding of so many rows may take: a file of some kB can hold a column of GBs."""
_READ_BYTES = 1 << 20
_FEW_ROWS = 1 << 20
"""Number of rows that any Parquet file may have; a larger number needs a byte of the file for each row."""
_BETWEEN = re.compile(r"[\s,]*")
_MAGIC = {b"\x1f\x8b": ".jsonl.gz", b"PAR1": ".parquet"}
ROWS = "a .jsonl file has an object in each line, a file of one JSON array is named .json"
"""Advice in messages about rows that cannot be read."""


@dataclass(frozen=True)
class DataRow:
    """One row of the data, not yet checked."""

    where: str
    """``file:number``: the line number in JSONL, else the row's number, counted from 1."""
    content: object
    """The decoded row, or a BadRow if it cannot be decoded."""


def rows_of_file(file: Path, kind: str) -> Iterator[DataRow]:
    """Yield the rows of a file; ``kind``: its suffix, one of ``READABLE``.

    Raise DataError if its content is of another kind, or if it cannot be read further.
    """
    with file.open("rb") as stream:
        start = stream.read(4)
    for magic, suffix in _MAGIC.items():
        if start.startswith(magic) and kind != suffix:
            raise DataError(f"data file '{file}' has the content of a {suffix} file; give it that suffix")
    yield from _READERS[kind](file)


def _jsonl_rows(file: Path) -> Iterator[DataRow]:
    packed = file.suffix == ".gz"
    left = _unpacked_bytes(file) if packed else math.inf
    num_empty = 0
    with gzip.open(file) if packed else file.open("rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(_LINE_BYTES + 1)
            left -= len(line)
            if len(line) > _LINE_BYTES:
                raise DataError(
                    f"{file}:{number}: the line has more than {_LINE_BYTES} bytes; cut the row into several"
                )
            if left < 0:
                raise _unpacks_too_much(f"{file}:{number}")
            if not line:
                return
            if line.strip():
                yield DataRow(f"{file}:{number}", _decode_line(line))
                continue
            num_empty += 1
            if num_empty > _EMPTY_LINES:
                raise DataError(f"{file}:{number}: more than {_EMPTY_LINES} lines are empty; remove them")


def _unpacked_bytes(file: Path) -> int:
    """Return how many bytes a compressed file may hold. A file of some kB must not keep a command for hours."""
    return max(_UNPACKED_BYTES, _MOST_PACKED * file.stat().st_size)


def _unpacks_too_much(where: str) -> DataError:
    return DataError(
        f"{where}: up to this row, the file holds more than {_MOST_PACKED} times as many bytes as it takes "
        "compressed, which data does not; write it as a .jsonl file if it is sound"
    )


def _decode_line(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if (problem := _other_encoding(line)) is not None:
            return BadRow("not UTF-8", problem)
        if not line.endswith(b"\n") and _is_cut(error):
            return BadRow(
                "not JSON", "the file is cut: it ends in the middle of this row; copy or download it again"
            )
        return BadRow(
            "not JSON",
            f"{error.msg.removesuffix(' at').removesuffix(' starting')} at column {error.colno}; {ROWS}",
        )
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", _as_utf8(error))
    except (ValueError, RecursionError) as error:  # too many digits, nested too deeply
        return BadRow("not JSON", cause(error))


def _as_utf8(error: UnicodeDecodeError) -> str:
    """Return what is wrong with text that is not UTF-8, and what to do."""
    problem = (
        f"{error.reason} at byte {error.start}; save the file as UTF-8, such as by iconv -f LATIN1 -t UTF-8"
    )
    return _other_encoding(error.object) or f"{problem} if it is in Latin-1"


def _other_encoding(data: bytes) -> str | None:
    """Return what to do with JSON in UTF-16 or UTF-32, which has null bytes; None for other data."""
    encoding = json.detect_encoding(data)
    begin = data[:64].decode(encoding, "ignore").lstrip("\ufeff \r\n\t")
    if encoding.startswith("utf-8") or not begin.startswith(("{", "[")):
        return None
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")  # as iconv spells it
    return f"it is in {name}; save the file as UTF-8, such as by iconv -f {name} -t UTF-8"


def _json_rows(file: Path) -> Iterator[DataRow]:
    content = read_bytes(file, DataError, _JSON_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {_as_utf8(error)}") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if (problem := _other_encoding(content)) is not None:
            raise DataError(f"{file}: not UTF-8: {problem}") from None
        if _has_lines(text, error):
            yield from _jsonl_rows(file)
            return
        raise DataError(f"{file}:{_problem(text, error)}") from None
    if isinstance(document, dict):  # also a single row, as of a file with a row in each line
        document = document["data"] if isinstance(document.get("data"), list) else [document]
    if not isinstance(document, list):
        raise DataError(
            f'{file}: expected a list of rows, {{"data": [...]}}, or a row in each of several lines'
        )
    for number, row in enumerate(document, start=1):
        yield DataRow(f"{file}:{number}", row)


def _has_lines(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether text that is not one JSON document may have a row in each line."""
    first_line = error.msg == "Extra data" or (error.lineno == 1 and "\n" in text.strip())
    return text.lstrip().startswith("{") and first_line


def _problem(text: str, error: json.JSONDecodeError) -> str:
    """Return the line of an error in a JSON list, and its problem; if the list is cut, after how many rows."""
    if "[" not in text or not _is_cut(error):
        return f"{error.lineno}: not JSON: {error.msg}"
    whole = _whole_rows(text, text.index("[") + 1)
    return (
        f" the file is cut: it ends in the middle of row {whole + 1}, after {counted(whole, 'whole row')}; copy or "
        "download it again, or end it after them"
    )


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Return whether the JSON only breaks off, so that more text might have made it valid."""
    rest = error.doc[error.pos :].strip()
    ends = error.msg.startswith("Unterminated") or any(
        word.startswith(rest) for word in ("true", "false", "null")
    )
    return ends and error.msg != "Extra data"


def _whole_rows(text: str, position: int) -> int:
    """Return the number of whole values of a cut list, the text of which begins at ``position``."""
    decoder = json.JSONDecoder()
    number = 0
    with suppress(json.JSONDecodeError):
        while True:
            begin = _BETWEEN.match(text, position)
            assert begin is not None
            _, position = decoder.raw_decode(text, begin.end())
            number += 1
    return number


def _parquet_rows(file: Path) -> Iterator[DataRow]:
    from pyarrow import OSFile, parquet

    # pyarrow would take some names for addresses of remote stores.
    with OSFile(str(file)) as source, parquet.ParquetFile(source, buffer_size=_READ_BYTES) as table:
        num_rows = table.metadata.num_rows
        num_bytes = file.stat().st_size
        if num_rows > max(_FEW_ROWS, num_bytes):
            raise DataError(
                f"{file}: it has {num_rows} rows in {num_bytes} bytes, expected a byte for each row"
            )
        batches = table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)
        number = 0
        left = _unpacked_bytes(file)
        while (decoded := _decoded_rows(f"{file}:{number + 1}", batches)) is not None:
            rows, size = decoded
            left -= size
            if left < 0:
                raise _unpacks_too_much(f"{file}:{number + 1}")
            for row in rows:
                number += 1
                yield DataRow(f"{file}:{number}", without_nulls(row))


def _decoded_rows(where: str, batches: Iterator[RecordBatch]) -> tuple[list[object], int] | None:
    """Return the rows of the next batch and their number of bytes, without dictionaries; None at the end."""
    from pyarrow import types

    try:
        with memory_limit(_BATCH_BYTES):
            if (batch := next(batches, None)) is None:
                return None
            columns = [
                column.dictionary_decode() if types.is_dictionary(column.type) else column for column in batch
            ]
            return batch.to_pylist(), sum(column.nbytes for column in columns)
    except MemoryError as error:
        raise DataError(
            f"{where}: {_BATCH_ROWS} rows from this one on take more than {_BATCH_BYTES >> 20} MiB of memory; cut "
            "them into several"
        ) from error


def without_nulls(value: object) -> object:
    """Return a value of a Parquet table without null fields.

    A table gives each row the fields of all rows; a field that a row did not have is null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and isinstance(
        next((part for part in value if part is not None), None), dict | list
    ):
        return [without_nulls(part) for part in value]
    return value


_READERS = {".jsonl": _jsonl_rows, ".jsonl.gz": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
READABLE = tuple(_READERS)
"""Suffixes of the files that ``rows_of_file`` reads."""
