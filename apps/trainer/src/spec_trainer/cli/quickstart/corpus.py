"""Read text that every CPython includes: documented source code, and the topics of ``help()``.

Source is read as text and never imported. A document is a module's docstring, a documented function or class
with its code, or a topic. Code is included, and classes are kept whole, because code is more regular than prose. A
target of a few million parameters then learns more than pairs of tokens, so that a trained draft can beat simple
baselines.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests and vendored or generated trees: many files, little that is documented, much that differs by distributor.
SKIPPED_FOLDERS = frozenset({
    "__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3",
    "ensurepip", "turtledemo", "encodings",
})  # fmt: skip
MIN_CHARS = 80  # shorter texts are stubs ("Return self.") that teach little and repeat everywhere
_LONG_LINE = 40  # a line of this length found in two files is a copy, not a coincidence

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Document:
    """A text, and the path of its file relative to the standard library's folder."""

    source: str
    text: str


def python_documents(folder: Path | None = None) -> list[Document]:
    """Return the documents of ``folder`` (default: the standard library), by file, without duplicates."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    documents: dict[str, Document] = {}
    for path in sorted(_python_files(root)):
        source = path.relative_to(root).as_posix()
        for text in _texts(path):
            if len(text) >= MIN_CHARS:
                documents.setdefault(" ".join(text.split()), Document(source, text))
    return list(documents.values())


def split_by_file(
    documents: Iterable[Document], held_out_share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents by file into training and held-out documents.

    Held-out documents that repeat training text are dropped.
    """
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        (held_out if _unit_hash(document.source, seed) < held_out_share else train).append(document)
    seen = {line for document in train for line in _long_lines(document.text)}
    return train, [document for document in held_out if not _mostly_seen(document.text, seen)]


def _python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files below ``root``, except in skipped folders, which may hold thousands."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _texts(path: Path) -> Iterator[str]:
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules are not this program's news
            source = file.read()
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # not readable as Python: a template, a data file, another encoding
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        yield from _topics(tree)
    else:
        yield ast.get_docstring(tree) or ""
        yield from _definitions(tree, source.splitlines())


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from (text.strip() for text in ast.literal_eval(node.value).values())


def _definitions(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yield the source of each top-level function or class that contains a docstring."""
    for node in tree.body:
        if isinstance(node, _DEFINITIONS) and any(_is_documented(inner) for inner in ast.walk(node)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield "\n".join(lines[first - 1 : node.end_lineno]).expandtabs().strip()


def _is_documented(node: ast.AST) -> bool:
    return isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None


def _unit_hash(source: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}:{source}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _long_lines(text: str) -> list[str]:
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if len(line) >= _LONG_LINE]


def _mostly_seen(text: str, seen: set[str]) -> bool:
    lines = _long_lines(text)
    return 2 * sum(line in seen for line in lines) > len(lines)
