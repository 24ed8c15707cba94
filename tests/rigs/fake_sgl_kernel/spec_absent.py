"""Import-only stand-ins for packages: every attribute is there, decorators hand functions on, nothing can be run."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Kind(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made = _Kind(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            made = _Absent(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args, **kwargs):
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.startswith(self._prefix)
            else None
        )

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module) -> None:
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)


def stand_in(package: str) -> None:
    """Turn a package that is being imported into such a stand-in."""
    sys.modules[package].__class__ = _Absent
    sys.meta_path.insert(0, _Finder(package))
