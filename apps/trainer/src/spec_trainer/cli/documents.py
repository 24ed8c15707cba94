"""Keep standard output for a command's document (its result); all other prints go to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import TextIOWrapper
from typing import Any, TextIO

from spec_core.errors import RunError
from spec_core.foreign import cause
from spec_core.wording import printable

_streams: list[TextIO] = []


class _StandardOutput(TextIOWrapper):
    """A stream whose failed writes, such as to a full disk, raise a RunError that names standard output."""

    def write(self, text: str, /) -> int:
        """Write text, or raise RunError."""
        with _named_failures():
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered, or raise RunError."""
        with _named_failures():
            super().flush()


@contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader wants no more: help then ends well
        raise
    except OSError as error:
        raise RunError(f"standard output could not be written: {cause(error)}") from error


def keep_stdout_for_documents() -> None:
    """Redirect the prints of this process, its C libraries and its children to standard error from now on.

    Only what goes to ``document_stream`` reaches standard output.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    # What the terminal's encoding lacks, such as é in ASCII, is written as an escape, as on standard error.
    encoding = sys.stdout.encoding
    errors = "backslashreplace"
    file = open(saved, "wb")  # noqa: SIM115 (open until the process ends)
    _streams.append(_StandardOutput(file, encoding=encoding, errors=errors))
    sys.stdout = sys.stderr


@contextmanager
def stdout_for_documents() -> Iterator[None]:
    """Redirect prints in the ``with`` block to standard error, except writes to ``document_stream``."""
    _streams.append(document_stream())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _streams.pop()


def document_stream() -> TextIO:
    """Return the real standard output, also within ``stdout_for_documents``."""
    return _streams[-1] if _streams else sys.stdout


def print_document(document: Mapping[str, Any], as_json: bool) -> None:
    """Print a command's document as JSON or YAML."""
    import yaml

    text = json.dumps(document, indent=2, default=str)
    # No message is broken into lines.
    options = {"sort_keys": False, "allow_unicode": True, "width": math.inf}
    print_text(text if as_json else yaml.safe_dump(json.loads(text), **options).rstrip())


def print_lines(document: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print ``document`` as JSON if ``as_json``; otherwise print ``lines``, its content as text for people."""
    print_document(document, as_json) if as_json else print_text("\n".join(lines))


def print_text(text: str) -> None:
    """Print text to standard output, without terminal control characters."""
    print(printable(text), file=document_stream(), flush=True)


def print_marked(lines: Iterable[str]) -> None:
    """Print lines unchanged. Their only control characters may be this program's colour codes."""
    for line in lines:
        print(line, file=document_stream())
    document_stream().flush()
