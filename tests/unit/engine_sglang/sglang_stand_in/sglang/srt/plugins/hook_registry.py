"""As SGLang's ``HookRegistry``: AFTER hooks on dotted names."""

import functools
import pkgutil
from enum import Enum
from typing import ClassVar


class HookType(Enum):
    AFTER = "after"


class HookRegistry:
    hooks: ClassVar[list] = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks:
            owner, _, name = target.rpartition(".")
            setattr(
                pkgutil.resolve_name(owner), name, _after(getattr(pkgutil.resolve_name(owner), name), hook)
            )
        cls.hooks.clear()


def _after(original, hook):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        result = original(*args, **kwargs)
        modified = hook(result, *args, **kwargs)
        return result if modified is None else modified

    return wrapper
