"""Core, the kit and the application hold no table of plugins: they name none, nor what only one plugin knows."""

import ast
import re
import tomllib
from functools import cache

import pytest

from .sources import ROOT, tree, walked

SHARED = ("core", "processes", "kit", "testing")
SOURCES = [
    *(file for name in SHARED for file in ROOT.glob(f"packages/{name}/src/**/*.py")),
    *ROOT.glob("apps/*/src/**/*.py"),
]
DRAFTS = list(ROOT.glob("packages/draft-*/src/**/*.py"))
TARGETS = {"LlamaForCausalLM"}
"""Architectures that targets have, too."""
VENDORS = {"nvidia", "huawei", "ascend", "cuda", "npu"}

COMMON = {"file", "collective", "ipc"}
"""Plugins that are called by a word which messages and code need for other things."""

APPLICATION = "apps/trainer/src/spec_trainer"
KIT, TESTING = "packages/kit/src/spec_kit", "packages/testing/src/spec_testing"
ALLOWED = {
    # Defaults: what a configuration that names no plugin asks for.
    (f"{APPLICATION}/configuration/plugin_names.py", "adamw"),
    (f"{APPLICATION}/configuration/plugin_names.py", "cpu"),
    (f"{APPLICATION}/configuration/plugin_names.py", "eagle3"),
    (f"{APPLICATION}/configuration/plugin_names.py", "fsdp"),
    (f"{APPLICATION}/configuration/plugin_names.py", "hf"),
    (f"{APPLICATION}/configuration/plugin_names.py", "local"),
    (f"{APPLICATION}/configuration/plugin_names.py", "muon"),
    (f"{APPLICATION}/measure/evaluation/request.py", "cpu"),
    (f"{APPLICATION}/measure/evaluation/request.py", "hf"),
    (f"{APPLICATION}/push/request.py", "cpu"),
    (f"{APPLICATION}/measure/regeneration/request.py", "cpu"),
    (f"{APPLICATION}/measure/regeneration/request.py", "hf"),
    (f"{APPLICATION}/cli/app.py", "cpu"),
    (f"{APPLICATION}/cli/quickstart/run.py", "cpu"),
    (f"{APPLICATION}/cli/quickstart/tiny_target.py", "muon"),
    # What the suites compute on, and draw by default.
    (f"{TESTING}/drawn_draft.py", "eagle3"),
    (f"{TESTING}/reference.py", "cpu"),
    # torch's word for the type of a device.
    (f"{TESTING}/transport_suite.py", "cpu"),
    (f"{TESTING}/weight_transport_suite.py", "cpu"),
    # The hub's own command `hf`, and its option, in messages.
    (f"{APPLICATION}/base/hub.py", "hf"),
    (f"{KIT}/drafting/draft_files.py", "hf"),
    (f"{KIT}/drafting/draft_files.py", "local"),
    # The owner of a data set on the hub.
    (f"{APPLICATION}/measure/evaluation/benchmarks.py", "nvidia"),
    # A draft must not name a device: the suite looks for these.
    (f"{TESTING}/conformance.py", "cuda"),
    (f"{TESTING}/conformance.py", "npu"),
}
"""A file outside the plugins, and the name that stands in it. None is the contract's."""


@cache
def plugin_names() -> set[str]:
    """Return the names of all entry points of the repository."""
    projects = [tomllib.loads(file.read_text())["project"] for file in ROOT.glob("packages/*/pyproject.toml")]
    groups = [group for project in projects for group in project.get("entry-points", {}).items()]
    return {name for group, points in groups if group.startswith("spec_core.") for name in points} - COMMON


@cache
def exported_architectures() -> set[str]:
    """Return the architectures that the repository's drafts export: words that end as a model's class does."""
    found = {
        word
        for file in DRAFTS
        for text in strings(tree(file))
        for word in re.findall(r"\b[A-Z]\w*(?:ForCausalLM\w*|DraftModel)\b", text)
    }
    return found - TARGETS


def strings(module: ast.Module) -> list[str]:
    """Return every string of the code but docstrings and torch's words for devices, which are no plugins."""
    excluded: set[int] = set()
    for node in walked(module):
        match node:
            case ast.Expr(value=ast.Constant() as documentation):
                excluded.add(id(documentation))
            case ast.Call(func=ast.Attribute(attr="device"), args=[ast.Constant(value="cpu") as device]):
                excluded.add(id(device))
            case ast.AnnAssign(target=ast.Name(id="device_type"), value=ast.Constant(value="cpu") as device):
                excluded.add(id(device))
            case ast.keyword(arg="device", value=ast.Constant(value="cpu") as device):
                excluded.add(id(device))
    return [
        node.value
        for node in walked(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in excluded
    ]


def named(module: ast.Module, names: set[str]) -> set[str]:
    """Return which of ``names`` stand, in any case, as words in the strings of ``module``."""
    words = {word.lower() for text in strings(module) for word in re.findall(r"[^\W_]\w*", text)}
    return {name for name in names if name.lower() in words}


def test_core_and_application_name_no_plugin():
    """Nothing stays in the list of what is allowed that is not needed any more."""
    names = plugin_names() | exported_architectures() | VENDORS
    found = {(str(file.relative_to(ROOT)), name) for file in SOURCES for name in named(tree(file), names)}
    assert found == ALLOWED


def test_names_and_architectures_are_found():
    assert {"cpu", "cuda", "eagle3", "dflash", "hf", "vllm", "fsdp", "local"} <= plugin_names()
    assert exported_architectures() >= {"LlamaForCausalLMEagle3", "DFlashDraftModel"}


@pytest.mark.parametrize(
    "code",
    [
        "TABLE = {'eagle3': 1}",
        "PACKAGES = ['spec-draft-dflash']",
        "if architecture in ('LlamaForCausalLMEagle3',): pass",
        "match engine.name:\n case 'sglang': pass",
        "raise ValueError('only vLLM loads this')",
        "vendor = 'NVIDIA'",
        "backends = dict(cpu='cpu')",
    ],
)
def test_planted_table_is_found(code):
    assert named(ast.parse(code), plugin_names() | exported_architectures() | VENDORS)


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    'Such as eagle3.'",
        "torch.device('cpu')",
        "safe_open(file, device='cpu')",
        "class B:\n    device_type: str = 'cpu'",
        "localhost = 'locally'",
    ],
)
def test_other_words_are_none(code):
    assert not named(ast.parse(code), plugin_names() | exported_architectures() | VENDORS)
