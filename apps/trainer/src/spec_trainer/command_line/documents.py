"""Standard output holds the documents of commands and nothing else: what plugins print goes to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from spec_core.wording import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import TextIO

_streams: list[TextIO] = []


def keep_stdout_for_documents() -> None:
    """Send to standard error what this process, its libraries in C and its children print from now on.

    Only what goes to ``document_stream`` reaches standard output.
    """
    if sys.stdout is None or sys.stderr is None:  # closed by who started this process
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    _streams.append(open(kept, "w", encoding=encoding, errors=errors))  # noqa: SIM115 (open until the process ends)
    sys.stdout = sys.stderr


@contextmanager
def stdout_for_documents() -> Iterator[None]:
    """Send to standard error what is printed in the block, but for what goes to ``document_stream``."""
    _streams.append(document_stream())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _streams.pop()


def document_stream() -> TextIO:
    """Return standard output as it is outside of ``stdout_for_documents``."""
    return _streams[-1] if _streams else sys.stdout


def print_document(document: Mapping[str, Any], as_json: bool) -> None:
    """Print a command's document, as JSON or YAML."""
    import yaml

    text = json.dumps(document, indent=2, default=str)
    # No message is broken into lines.
    options = {"sort_keys": False, "allow_unicode": True, "width": math.inf}
    print_text(text if as_json else yaml.safe_dump(json.loads(text), **options).rstrip())


def print_lines(document: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print a document as JSON, or the lines that say the same."""
    print_document(document, as_json) if as_json else print_text("\n".join(lines))


def print_text(text: str) -> None:
    """Print lines of a document, without the characters that a terminal would obey."""
    print(printable(text), file=document_stream(), flush=True)


def print_marked(lines: Iterable[str]) -> None:
    """Print lines that hold nothing for a terminal to obey but the colours of this program."""
    for line in lines:
        print(line, file=document_stream())
    document_stream().flush()
