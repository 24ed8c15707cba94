"""Read in the installed vLLM's source which targets give drafts their hidden states; vLLM itself is not imported."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_INTERFACE = "SupportsEagle3"
"""Base class of vLLM's models that give the hidden states of chosen layers (``model_executor/models/interfaces.py``,
read in vLLM 0.26 and 0.32). vLLM asks for it when its workers start, a minute after the command."""

_MODELS = "vllm.model_executor.models."


def gives_states(architecture: str, models: Path | None = None) -> bool:
    """Return whether vLLM can give a draft the hidden states of targets of this architecture.

    ``models``: the folder of vLLM's models, by default that of the installed vLLM. What the source does not say
    counts as true: if no vLLM is installed, and for targets that Transformers' classes run inside vLLM.
    """
    models = models or _installed_models()
    registry = models and models / "registry.py"
    if models is None or registry is None or not registry.is_file():
        return True
    for node in ast.walk(ast.parse(registry.read_text())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (
                    isinstance(key, ast.Constant)
                    and key.value == architecture
                    and isinstance(value, ast.Tuple)
                ):
                    module, name, *_ = (ast.literal_eval(part) for part in value.elts)
                    return _has_interface(models / f"{module}.py", name)
    return True


def _installed_models() -> Path | None:
    vllm = find_spec("vllm")
    folders = [] if vllm is None else vllm.submodule_search_locations or []
    return next((Path(folder, "model_executor/models") for folder in folders), None)


def _has_interface(file: Path, name: str) -> bool:
    """Return whether a class of this module, or one that it imports from a neighbour, has the interface."""
    if name == _INTERFACE or not file.is_file():
        return True
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = (base.id for base in node.bases if isinstance(base, ast.Name))
            return any(_has_interface(file, base) for base in bases)
        if isinstance(node, ast.ImportFrom) and (neighbour := _neighbour(node)):
            for imported in node.names:
                if (imported.asname or imported.name) == name:
                    return _has_interface(file.with_name(f"{neighbour}.py"), imported.name)
    return False


def _neighbour(imports: ast.ImportFrom) -> str | None:
    """Return the name of the module if it is a model's, too."""
    module = imports.module or ""
    if imports.level:
        return module if imports.level == 1 else None
    return module.removeprefix(_MODELS) if module.startswith(_MODELS) else None
