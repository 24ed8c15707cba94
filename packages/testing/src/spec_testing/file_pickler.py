"""Pickle functions and classes with their file, as a child process cannot import pytest's modules by name alone."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import pickle
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


class _Pickler(pickle.Pickler):
    """A pickler that stores functions and classes with the file of their module."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType | type) or obj.__module__ == __name__:
            return NotImplemented
        path = getattr(sys.modules[obj.__module__], "__file__", None)
        return NotImplemented if path is None else (_find, (path, obj.__module__, obj.__qualname__))


def dumps(value: Any) -> bytes:
    """Return ``value``, pickled for ``pickle.loads`` in another process."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _find(path: str, module: str, name: str) -> Any:
    found: Any = _load(path, module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _load(path: str, name: str) -> ModuleType:
    parts = name.split(".")
    file = Path(path).with_suffix("")
    if (
        file.parts[-len(parts) :] == tuple(parts)
        and (root := str(file.parents[len(parts) - 1])) not in sys.path
    ):
        sys.path.append(root)  # for what the module imports from its own packages
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) == path:
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
