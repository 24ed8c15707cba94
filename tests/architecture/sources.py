"""The repository's Python files, each read and parsed once for all tests of this folder."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("*/*/src/**/*.py"))


@cache
def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(text(file))


@cache
def walked(parsed: ast.Module) -> list[ast.AST]:
    """All nodes of a tree."""
    return list(ast.walk(parsed))
