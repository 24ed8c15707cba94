"""This module has the base class of all suites, and functions that inspect the code of a plugin."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from spec_testing.limits import patient

SUBPROCESS_LIMIT_S = patient(60.0)

_BLOCK_IMPORTS = "import sys; sys.modules.update(dict.fromkeys({names!r}))\n"


class ConformanceSuite:
    """Base of every suite. A subclass adds fixtures and tests, and must not change tests of the suite.

    To exclude a test that an implementation cannot pass, override it with ``@pytest.mark.xfail(reason="…")``,
    so that the report names it. Any other override raises TypeError when the class is created.
    """

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Compute with one thread: for small tensors, two threads on a busy machine are 20 times slower."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def __init_subclass__(cls) -> None:
        """Raise TypeError if a subclass overrides a test without a reason."""
        super().__init_subclass__()
        for name, member in vars(cls).items():
            inherited = any(hasattr(base, name) for base in cls.__bases__)
            if name.startswith("test_") and inherited and not _explained(member):
                raise TypeError(
                    f"{cls.__name__} overrides {name} of a conformance suite; "
                    "mark the override with pytest.mark.xfail(reason=…) if the contract cannot be kept"
                )


def _explained(member: object) -> bool:
    marks = getattr(member, "pytestmark", [])
    return any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)


def run_python(code: str, blocked: Sequence[str] = ()) -> str:
    """Run ``code`` in a fresh interpreter in which importing ``blocked`` fails; return its output.

    Raise AssertionError with the child's stderr if it fails.
    """
    child = subprocess.run(
        [sys.executable, "-c", _BLOCK_IMPORTS.format(names=list(blocked)) + code],
        capture_output=True,
        text=True,
        timeout=SUBPROCESS_LIMIT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert child.returncode == 0, child.stderr or child.stdout
    return child.stdout


def import_without_torch(plugin: type) -> None:
    """Import the module of ``plugin`` in a fresh interpreter in which torch cannot be imported."""
    run_python(f"import importlib; importlib.import_module({plugin.__module__!r})", blocked=["torch"])


def sources(plugin: type) -> Iterator[tuple[Path, ast.Module]]:
    """Yield path and syntax tree of every Python file in the package (or single module) of ``plugin``."""
    for file in _files(plugin.__module__):
        yield file, ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def _files(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    return sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]


def forbidden(tree: ast.Module) -> list[str]:
    """Return the lines that name an optimizer, a collective or a device."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.optim", "torch.distributed"}:
            found.append(f"{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("torch.optim", "torch.distributed")
        ):
            found.append(f"{node.lineno} {node.module}")
        elif isinstance(node, ast.Constant) and str(node.value).split(":")[0] in {
            "cuda",
            "npu",
            "xpu",
            "mps",
        }:
            found.append(f"{node.lineno} {node.value!r}")
    return found
