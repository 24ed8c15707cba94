"""Import each public name of a library from its module only when the name is first used.

So a package can list names whose modules need torch, and still be imported without torch. The imports that a type
checker reads are the list: names are not written again for the run time.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str, extra: str = "") -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` whose names are the imports under ``if TYPE_CHECKING:`` in ``file``.

    Example: ``__getattr__ = lazy_names(__name__, __file__)``, after ``else:`` or at the end of the module.
    ``extra``: extra of spec-kit that brings what these modules import of others.
    """

    def find(name: str) -> Any:
        if (module := _modules(file).get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if not extra:
                raise
            needed = f"{package}.{name} needs {error.name}; pip install 'spec-kit[{extra}]'"
            raise ModuleNotFoundError(needed, name=error.name) from error

    return find


@cache
def _modules(file: str) -> dict[str, str]:
    """Return name -> module for each import in the blocks for type checkers."""
    nodes = ast.parse(Path(file).read_text(encoding="utf-8")).body
    blocks = [
        node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
