"""As SGLang's ``HookRegistry``: AFTER and AROUND hooks on dotted names."""

import functools
import pkgutil
from enum import Enum
from typing import ClassVar


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[list] = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, kind in cls.hooks:
            owner, _, name = target.rpartition(".")
            place = pkgutil.resolve_name(owner)
            wrap = _after if kind is HookType.AFTER else _around
            if isinstance(original := vars(place)[name], classmethod):
                setattr(place, name, classmethod(wrap(original.__func__, hook)))
            else:
                setattr(place, name, wrap(original, hook))
        cls.hooks.clear()


def _after(original, hook):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        result = original(*args, **kwargs)
        modified = hook(result, *args, **kwargs)
        return result if modified is None else modified

    return wrapper


def _around(original, hook):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return wrapper
