"""Import the public names of a library lazily: each from its module, when it is first used.

So a package can list names whose modules need torch, and still be imported without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_names(package: str, **modules: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package``. Each keyword is a module; its value is the module's names.

    ``__getattr__ = lazy_names(__name__, rope="Rope rotate")``
    """
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return find
