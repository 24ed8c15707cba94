"""Find imports in a plugin's sources that fail only when a run reaches them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = ("spec_core", "spec_processes", "spec_kit", "spec_testing")
"""Packages whose names a plugin may import, and which a later release may have renamed."""


def gone_import(package: str) -> str | None:
    """Return where a package's sources import a name that this project's libraries lack, or None.

    The package itself is not imported. Imports for type checkers and imports in ``try`` do not count, because they
    may fail.
    """
    for file in _sources(package):
        imports = _Imports()
        imports.visit(ast.parse(file.read_bytes(), str(file)))
        for line, module, name in imports.found:
            if module.partition(".")[0] in _LIBRARIES and not _exists(module, name):
                return f"{file}:{line} imports {module}{f'.{name}' if name else ''}, which does not exist"
    return None


def _sources(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    if not folders and spec and spec.origin:
        yield Path(spec.origin)
    for folder in folders:
        yield from sorted(Path(folder).rglob("*.py"))


class _Imports(ast.NodeVisitor):
    """Collects absolute imports as (line, module, name); the name is empty for ``import module``."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, str]] = []

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name, "") for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            self.found += [(node.lineno, node.module, alias.name) for alias in node.names]

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        """Pass over imports that have a fallback."""


def _exists(module: str, name: str) -> bool:
    """Return whether the name can be imported, as far as the packages that it needs are installed."""
    try:
        found = importlib.import_module(module)
        return not name or name == "*" or hasattr(found, name) or find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError as error:  # torch, for one, may be absent
        return (error.name or "").partition(".")[0] not in _LIBRARIES
