"""Rules about the sources that no linter knows."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import spec_core

from .private_imports import LIBRARIES, MODULES, PACKAGES
from .sources import ROOT, SOURCES, text, tree, walked

PUBLIC_NAMES = Path(__file__).with_name("public_names.txt")

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ABSTRACT_METHODS = 8
MAX_TEST_NAME = 80

PLUGIN_NAMES = (
    "cuda|ascend|npu|cpu|eagle3|dflash2|dflash|lilicorr|dspark|mtp|peagle|vllm|sglang|hf|fsdp|megatron|nccl|"
    "hccl"
)
BRANCH_ON_A_NAME = re.compile(rf"[=!]= ?['\"]({PLUGIN_NAMES})['\"]|['\"]({PLUGIN_NAMES})['\"] ?[=!]=")


def functions(module: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in walked(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring."""
    doc = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - (doc.count("\n") + 1 if doc else 0)


def writes_environment(node: ast.AST) -> bool:
    """``os.environ[…] = …``, ``del os.environ[…]``, ``os.environ.update(…)`` and their like."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) == "os.environ" and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Call):
        return (
            re.fullmatch(
                r"os\.(environ\.(update|setdefault|pop|clear|popitem)|putenv|unsetenv)",
                ast.unparse(node.func),
            )
            is not None
        )
    return False


def interfaces() -> list[type]:
    public = [getattr(spec_core, name) for name in spec_core.__all__]
    return [member for member in public if getattr(member, "__abstractmethods__", None)]


def public_names() -> list[str]:
    """Return all that a plugin may rely on: the names of the public modules, and the members of the interfaces."""
    names = []
    for module in (*PACKAGES, *MODULES):
        loaded = importlib.import_module(module)
        own = {name for name, member in vars(loaded).items() if getattr(member, "__module__", None) == module}
        names += [f"{module}.{name}" for name in getattr(loaded, "__all__", own) if not name.startswith("_")]
    for interface in interfaces():
        names += [
            f"spec_core.{interface.__name__}.{name}" for name in vars(interface) if not name.startswith("_")
        ]
    return sorted(names)


def test_the_sources_are_found():
    assert len(SOURCES) > 40


def test_no_module_is_too_long():
    lengths = {str(file.relative_to(ROOT)): text(file).count("\n") for file in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_MODULE_LINES} == {}


def test_no_function_is_too_long():
    sizes = {
        f"{file.relative_to(ROOT)}:{function.lineno} {function.name}": code_lines(function)
        for file in SOURCES
        for function in functions(tree(file))
    }
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FUNCTION_LINES} == {}


def test_names_of_tests_are_short():
    names = [
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(
            r"^ *(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []


def test_nobody_branches_on_a_plugins_name():
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in SOURCES
        for number, line in enumerate(text(file).splitlines(), start=1)
        if BRANCH_ON_A_NAME.search(line)
    ]
    assert found == []


def test_nobody_writes_the_environment():
    """A child's environment is computed by Backend.child_env and handed over when the child starts.

    But for one variable: multiprocessing and other libraries start children that nobody can hand anything to.
    """
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in SOURCES
        if file.name != "safe_path.py"
        for node in walked(tree(file))
        if writes_environment(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["os.environ['A'] = 'b'", "del os.environ['A']", "os.environ.update(A='b')", "os.putenv('A', 'b')"],
)
def test_writing_the_environment_would_be_found(line):
    assert any(writes_environment(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.parametrize("line", ["os.environ['A']", "os.environ.get('A')", "{**os.environ}"])
def test_reading_the_environment_is_no_writing(line):
    assert not any(writes_environment(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.parametrize("interface", interfaces(), ids=lambda interface: interface.__name__)
def test_interfaces_are_small(interface):
    counted = [
        name
        for name in interface.__abstractmethods__
        if name != "close" and not isinstance(inspect.getattr_static(interface, name), property)
    ]
    assert len(counted) <= MAX_ABSTRACT_METHODS


def test_public_names_change_on_purpose():
    """To change them: edit public_names.txt, and write the change into CHANGELOG.md."""
    assert public_names() == PUBLIC_NAMES.read_text().splitlines()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_listed_name_is_there(library):
    module = importlib.import_module(library)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    assert not hasattr(module, "no_such_name")


def test_public_members_are_documented():
    """Every public class and function of spec_core says what it is."""
    public = {name: getattr(spec_core, name) for name in spec_core.__all__}
    documentable = {n: m for n, m in public.items() if inspect.isclass(m) or inspect.isfunction(m)}
    assert [name for name, member in documentable.items() if not member.__doc__] == []


def test_what_core_publishes_comes_from_core():
    """``from spec_core import Engine`` everywhere outside core, never ``from spec_core.engine import Engine``."""
    published, files = (
        set(spec_core.__all__),
        [*SOURCES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")],
    )
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {', '.join(published & {name.name for name in node.names})}"
        for file in files
        if "spec_core" not in file.parts
        for node in walked(tree(file))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("spec_core.")
        if published & {name.name for name in node.names}
    ]
    assert found == []
