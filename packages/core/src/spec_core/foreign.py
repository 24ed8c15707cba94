"""Turn any error that other libraries' parsers raise into a one-line error of this project.

transformers, tokenizers, safetensors, yaml, jinja and json promise no type of exception for damaged input:
RecursionError, AttributeError and a plain Exception were all seen, and tokenizers' panics derive from
BaseException alone. A call of such a library is wrapped in ``foreign_errors``; a file is read by
``read_bytes``.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pydantic

from spec_core.errors import SpecError

_MAX_JSON_BYTES = 64 << 20  # the largest index and tokenizer files of public models have some 20 MB
_OURS = (SpecError, KeyboardInterrupt, GeneratorExit)


@contextmanager
def foreign_errors(error_type: type[SpecError], problem: str) -> Generator[None]:
    """Raise ``error_type`` with the text "problem: cause" for any foreign error in the block.

    This project's own errors pass through. SystemExit is converted, too, so that no library or plugin can end a
    command.
    """
    try:
        yield
    except _OURS:
        raise
    except BaseException as error:
        raise error_type(f"{problem}: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """Return the first line of an error's message, with the error's type if the message alone says little."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pydantic.ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))
    text = next(iter(str(error).strip().splitlines()), "")
    return (
        text
        if isinstance(error, ValueError | SpecError) and text
        else f"{type(error).__name__}: {text}".rstrip(": ")
    )


def read_bytes(file: Path, error_type: type[SpecError], max_bytes: int = _MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file; refuse a pipe, a device or more than ``max_bytes``."""
    with foreign_errors(error_type, f"{file} cannot be read"):
        check_regular(file, error_type, max_bytes)
        return file.read_bytes()


def check_regular(file: Path, error_type: type[SpecError], max_bytes: int | None = None) -> None:
    """Raise ``error_type`` if ``file`` is a pipe, device or folder, or larger than ``max_bytes``."""
    with foreign_errors(error_type, f"{file} cannot be read"):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise error_type(f"{file} is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise error_type(f"{file} has {status.st_size} bytes, expected at most {max_bytes}")


def parse_json_object(text: bytes | str, where: object, error_type: type[SpecError]) -> dict[str, Any]:
    """Return the JSON object in ``text``. ``where``: its file or source, for error messages."""
    with foreign_errors(error_type, f"{where} is not JSON"):
        value: object = json.loads(text)
    if not isinstance(value, dict):
        raise error_type(f"{where} holds no JSON object")
    return cast("dict[str, Any]", value)


def read_json_object(file: Path, error_type: type[SpecError]) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    return parse_json_object(read_bytes(file, error_type), file, error_type)
