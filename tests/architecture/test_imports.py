"""The import law, and what importing costs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from .private_imports import LIBRARIES, check

ROOT = Path(__file__).parents[2]
LIMIT_S = 60

INTERFACES = [
    "spec_core",
    *(
        f"spec_core.{name}"
        for name in (
            "backend", "config", "draft", "engine", "errors", "launcher", "ops", "optimizer", "plugins",
            "process_group", "draft_replica", "records", "rendezvous", "state_folder", "strategy", "target",
            "tracker", "transport", "weight_manifest", "weight_transport",
        )
    ),
]  # fmt: skip


def entry_point_modules() -> list[str]:
    """Modules that the workspace's entry points and commands name."""
    modules: set[str] = set()
    for file in ROOT.glob("*/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        groups = [*project.get("entry-points", {}).values(), project.get("scripts", {})]
        modules |= {value.partition(":")[0] for group in groups for value in group.values()}
    return sorted(modules)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """lint-imports with the configuration and the packages of ``folder``."""
    sources = [str(path) for path in sorted(folder.glob("*/*/src"))]
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def workspace(tmp_path) -> Path:
    """A copy of the root configuration and of every package's sources."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for source in ROOT.glob("*/*/src"):
        shutil.copytree(
            source, tmp_path / source.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def test_import_law_holds():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kept, 0 broken" in done.stdout


FORBIDDEN = [
    ("spec_core.errors", "spec_trainer"),
    ("spec_core.errors", "spec_kit"),
    ("spec_core.errors", "spec_core.plugins"),
    ("spec_core.errors", "spec_draft_eagle3"),
    ("spec_trainer", "spec_draft_eagle3"),
    ("spec_trainer", "spec_backend_cuda"),
    ("spec_draft_eagle3", "spec_trainer"),
    ("spec_draft_dflash", "spec_draft_eagle3"),
    ("spec_backend_cuda", "spec_backend_ascend"),
    ("spec_engine_vllm", "spec_trainer"),
    ("spec_engine_vllm", "spec_engine_hf"),
    ("spec_trainer", "spec_launcher_local"),
    ("spec_launcher_ray", "spec_launcher_local"),
    ("spec_core.errors", "spec_kit.streams"),
    ("spec_kit.streams", "spec_kit.hosting"),
    ("spec_kit.drafting", "spec_kit.collectives"),
    ("spec_processes", "spec_kit"),
    ("spec_trainer.data", "spec_trainer.plan.resolve"),
    ("spec_trainer.training.loop", "spec_trainer.cli.commands.train"),
]
"""A module, and what the import law forbids it to import."""


def test_planted_violations_are_named(workspace):
    for importer, imported in FORBIDDEN:
        (file,) = [
            *workspace.glob(f"*/*/src/{importer.replace('.', '/')}.py"),
            *workspace.glob(f"*/*/src/{importer.replace('.', '/')}/__init__.py"),
        ]
        file.write_text(f"{file.read_text()}\nimport {imported}\n")
    done = lint(workspace)
    assert done.returncode == 1, done.stderr
    # A chain of one import is that contract's; a longer one may lead through another planted import.
    named = re.findall(r"^- +(\S+) -> (\S+) \(l\.\d+\)\n$", done.stdout, re.MULTILINE)
    assert set(FORBIDDEN) <= set(named)


def test_plugins_import_public_names_only():
    found = subprocess.run(
        [sys.executable, Path(__file__).with_name("private_imports.py")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


PRIVATE = [
    ("from spec_kit.streams.free_list import FreeList", "spec_kit.streams.free_list.FreeList"),
    ("def f():\n    from spec_core.plugins import installed", "spec_core.plugins.installed"),
    ("from spec_core import wording", "spec_core.wording"),
    ("from spec_core.errors import annotations", "spec_core.errors.annotations"),
    ("import spec_processes.sockets.rendezvous_server", "spec_processes.sockets.rendezvous_server"),
]
"""Code that imports a private name, and the name."""


def test_planted_private_imports_are_found(workspace):
    for number, (code, _) in enumerate(PRIVATE):
        file = workspace / f"packages/draft-eagle3/src/spec_draft_eagle3/planted_{number}.py"
        file.write_text(f"{code}\n")
    found = check(workspace)
    for number, (_, name) in enumerate(PRIVATE):
        (line,) = [line for line in found if f"planted_{number}.py" in line]
        assert f" {name} is on no public list" in line


def test_a_public_name_of_the_contract_is_imported_from_its_list(workspace):
    planted = workspace / "packages/kit/src/spec_kit/planted.py"
    planted.write_text("from spec_core.draft import Draft, _private\nfrom spec_core import Span\n")
    assert check(workspace) == [
        f"packages/kit/src/spec_kit/planted.py:{line}"
        for line in (
            "1: spec_core.draft.Draft is imported from spec_core",
            "2: spec_core.Span is imported from spec_core.records",
        )
    ]


def test_interfaces_and_entry_points_import_without_torch_and_without_effects():
    libraries = [name for name in LIBRARIES if name != "spec_testing"]
    modules = [*INTERFACES, *libraries, *entry_point_modules()]
    assert len(modules) > len(INTERFACES) + 10
    code = (
        "import importlib, logging, os, sys, threading\n"
        "sys.modules['torch'] = None\n"
        "def traces(): return dict(os.environ), len(logging.getLogger().handlers), threading.active_count()\n"
        "before = traces()\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert before == traces()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
