"""Import each public name of a library from its module only when the name is first used.

So a package can list names whose modules need torch, and still be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_names(package: str, **modules: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package``; each keyword maps a module to the public names in it.

    Example: ``__getattr__ = lazy_names(__name__, rope="Rope rotate")``
    """
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return find
