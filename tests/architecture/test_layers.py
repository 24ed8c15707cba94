"""A module that a string names (an entry, a process's program) is imported as surely as by a statement."""

import ast
import re
import tomllib

import pytest

from .sources import ROOT, tree, walked

SOURCES = {
    ".".join(file.relative_to(folder).with_suffix("").parts): file
    for folder in ROOT.glob("*/*/src")
    for file in folder.rglob("*.py")
}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = {
    f"{container}.{module}": -height
    for contract in CONTRACTS
    for container in contract.get("containers", [])
    for height, layer in enumerate(contract["layers"])
    for module in re.split(r" [|:] ", layer)
}


BASES = ("spec_core", "spec_processes", "spec_kit")
"""Packages that all others may name, each those before it."""


def named_modules(module: ast.Module) -> set[str]:
    """Modules of ours that strings name, alone or before a colon or an attribute."""
    strings = {
        node.value
        for node in walked(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    words = {word for word in strings if re.fullmatch(r"spec_\w+(\.\w+)+(:\w+)?", word)}
    names = {
        part for word in words for part in (word.partition(":")[0], word.partition(":")[0].rpartition(".")[0])
    }
    return names & SOURCES.keys()


def is_allowed(importer: str, imported: str) -> bool:
    packages = importer.partition(".")[0], imported.partition(".")[0]
    if packages[0] != packages[1]:
        return packages[1] in BASES[: BASES.index(packages[0]) if packages[0] in BASES else len(BASES)]
    heights = [LAYERS.get(".".join(name.split(".")[:2]), 0) for name in (importer, imported)]
    same_room = importer.split(".")[:2] == imported.split(".")[:2]
    return (
        same_room or packages[0] not in {name.partition(".")[0] for name in LAYERS} or heights[0] > heights[1]
    )


def test_strings_keep_the_layers():
    found = [
        f"{importer} names {imported}"
        for importer, file in SOURCES.items()
        for imported in named_modules(tree(file))
        if not is_allowed(importer, imported)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("importer", "code", "imported"),
    [
        (
            "spec_trainer.workers.worker_driver",
            "Program('spec_trainer.cli.commands.train:run_training')",
            "spec_trainer.cli.commands.train",
        ),
        ("spec_engine_vllm.process", "module = 'spec_trainer.cli.app'", "spec_trainer.cli.app"),
        (
            "spec_processes.spawn",
            "pkgutil.resolve_name('spec_kit.hosting.modes:CaptureMode')",
            "spec_kit.hosting.modes",
        ),
    ],
)
def test_a_planted_string_would_be_found(importer, code, imported):
    assert named_modules(ast.parse(code)) == {imported}
    assert not is_allowed(importer, imported)
