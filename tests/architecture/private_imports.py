"""Find what plugins import of spec_core that is on no public list, those of the tests too; ``make check`` runs this.

Public are ``__all__`` of ``spec_core`` and of its libraries, and every name that ``spec_core.errors`` and
``spec_core.records`` define. A library's modules are private: their names come from the package.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MODULES = ("errors", "records")
LIBRARIES = (
    "collectives",
    "drafting",
    "hosting",
    "processes",
    "sharding",
    "streams",
    "targets",
    "testing",
    "weight_sync",
)


def listed(tree: ast.Module) -> set[str]:
    """Return ``__all__`` as it is written, or every name without underscore that a module without it defines."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def public_names(root: Path) -> dict[str, set[str]]:
    """Return the names on each public list, by the module that they are imported from."""
    core = root / "packages/core/src/spec_core"
    files = {"spec_core": core / "__init__.py"}
    files |= {f"spec_core.{name}": core / f"{name}.py" for name in MODULES}
    files |= {f"spec_core.{name}": core / name / "__init__.py" for name in LIBRARIES}
    names = {module: listed(ast.parse(file.read_text(encoding="utf-8"))) for module, file in files.items()}
    names["spec_core"] |= {*MODULES, *LIBRARIES}
    return names


def private_imports(tree: ast.Module, public: dict[str, set[str]]) -> list[tuple[int, str]]:
    """Return line and name of each import of something private."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "spec_core":
                known = public.get(module, set())
                found += [(node.lineno, f"{module}.{name.name}") for name in names if name.name not in known]
            case ast.Import(names=names):
                ours = [name.name for name in names if name.name.partition(".")[0] == "spec_core"]
                found += [(node.lineno, name) for name in ours if name not in public]
    return found


def check(root: Path) -> list[str]:
    """Return one line for every private import of the plugins below ``root``."""
    public = public_names(root)
    sources = [*root.glob("packages/*/src/**/*.py"), *root.glob("tests/plugins/*/**/*.py")]
    return [
        f"{file.relative_to(root)}:{line}: {name} is on no public list of spec_core"
        for file in sorted(sources)
        if file.relative_to(root).parts[1] != "core"
        for line, name in private_imports(ast.parse(file.read_text(encoding="utf-8")), public)
    ]


def main() -> int:
    """Print what is found; return the exit code."""
    root = Path(__file__).parents[2]
    found = check(root)
    print("\n".join(found) or "no plugin imports a private name of spec_core")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
