"""Find what plugins import that is on no public list, those of the tests too, and what anybody imports from a module
of ``spec_core`` though a public list has it; ``make check`` runs this.

Public are ``__all__`` of ``spec_core`` and of the packages below it in PACKAGES, and every name that
``spec_core.errors`` and ``spec_core.records`` define. Modules are private: their names come from the package.
"""

import ast
import sys
from pathlib import Path

MODULES = ("spec_core.errors", "spec_core.records")
LIBRARIES = (
    "spec_kit.block_drafting",
    "spec_kit.chain_drafting",
    "spec_kit.collectives",
    "spec_kit.drafting",
    "spec_kit.hosting",
    "spec_kit.layers",
    "spec_kit.live_traffic",
    "spec_kit.sharding",
    "spec_kit.streams",
    "spec_kit.targets",
    "spec_kit.weight_sync",
    "spec_processes",
    "spec_processes.sockets",
    "spec_testing",
)
PACKAGES = ("spec_core", "spec_kit", *LIBRARIES)
OURS = frozenset(name.partition(".")[0] for name in PACKAGES)


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

    def source(module: str) -> Path:
        package = module.partition(".")[0]
        return root / "packages" / package.removeprefix("spec_") / "src" / module.replace(".", "/")

    files = {package: source(package) / "__init__.py" for package in PACKAGES}
    files |= {module: source(module).with_suffix(".py") for module in MODULES}
    names = {module: listed(ast.parse(file.read_text(encoding="utf-8"))) for module, file in files.items()}
    for module in files:
        parent, _, name = module.rpartition(".")
        if parent:
            names[parent].add(name)
    return names


def private_imports(tree: ast.Module, public: dict[str, set[str]]) -> list[tuple[int, str]]:
    """Return line and name of each import of something private."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in OURS:
                known = public.get(module, set())
                found += [(node.lineno, f"{module}.{name.name}") for name in names if name.name not in known]
            case ast.Import(names=names):
                ours = [name.name for name in names if name.name.partition(".")[0] in OURS]
                found += [(node.lineno, name) for name in ours if name not in public]
    return found


def roundabout_imports(tree: ast.Module, public: dict[str, set[str]]) -> list[tuple[int, str, str]]:
    """Return line, name and public list of each name of ``spec_core`` that is not imported from its list."""
    home = {name: module for module in ("spec_core", *MODULES) for name in public[module]}
    return [
        (node.lineno, f"{node.module}.{name.name}", home[name.name])
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "spec_core"
        for name in node.names
        if home.get(name.name, node.module) != node.module
    ]


def check(root: Path) -> list[str]:
    """Return one line for every private import of the plugins below ``root``, and every roundabout one of anybody."""
    public = public_names(root)
    found = [
        f"{file.relative_to(root)}:{line}: {name} is imported from {module}"
        for file in sorted(root.glob("*/*/src/**/*.py"))
        if "spec_core" not in file.parts
        for line, name, module in roundabout_imports(ast.parse(file.read_text(encoding="utf-8")), public)
    ]
    sources = [*root.glob("packages/*/src/**/*.py"), *root.glob("tests/plugins/*/**/*.py")]
    return found + [
        f"{file.relative_to(root)}:{line}: {name} is on no public list"
        for file in sorted(sources)
        if f"spec_{file.relative_to(root).parts[1]}" not in OURS
        for line, name in private_imports(ast.parse(file.read_text(encoding="utf-8")), public)
    ]


def main() -> int:
    """Print what is found; return the exit code."""
    root = Path(__file__).parents[2]
    found = check(root)
    print("\n".join(found) or "all names are imported from their public lists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
