"""Python finds this at start-up when the rig's folder is on PYTHONPATH: once torch_npu is imported, it can compute.

Processes that never import torch_npu, such as the command's, notice nothing.
"""

import atexit
import gc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Completed(Loader):
    """Runs the real loader, then installs the operators."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        import cpu_operators

        cpu_operators.install()


class Watch(MetaPathFinder):
    """Finds torch_npu as the others do, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch_npu":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = Completed(spec.loader)
        return spec


sys.meta_path.insert(0, Watch())
gc.set_threshold(50_000, 20, 20)  # importing torch and torch_npu takes a fifth less with fewer collections
atexit.register(gc.freeze)  # nor is there anything to find at the end
