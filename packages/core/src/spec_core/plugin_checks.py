"""Check that a plugin's class fulfils the interface of its kind: base class, version, members."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from spec_core.backend import Backend
from spec_core.draft import Draft
from spec_core.engine import Engine
from spec_core.errors import PluginApiMismatch, PluginInvalid
from spec_core.launcher import Launcher
from spec_core.optimizer import Optimizer
from spec_core.plugin_records import PluginRecord
from spec_core.serving import Serving
from spec_core.strategy import Strategy
from spec_core.tracker import Tracker
from spec_core.weight_transport import WeightTransport

P = TypeVar("P", Backend, Draft, Engine, Launcher, Optimizer, Strategy, Tracker, WeightTransport)
INTERFACES: tuple[Any, ...] = P.__constraints__
"""The interface of each kind of plugin."""


def checked_plugin(interface: type[P], plugin: object, record: PluginRecord) -> type[P]:
    """Return ``plugin``, which ``record`` names. Raise a PluginError if it does not fulfil the interface."""
    what = record.what
    if not (inspect.isclass(plugin) and issubclass(plugin, interface)):
        raise PluginInvalid(
            f"{what}: {record.entry_point.value} is not a subclass of spec_core.{interface.__name__}"
        )
    # Check the version first: a plugin for another version may rightly lack members of this version.
    if problem := _version_problem(interface, plugin, record.distribution):
        raise PluginApiMismatch(f"{what} {problem}")
    if problem := _problem(interface, plugin, record.name):
        raise PluginInvalid(f"{what}: {plugin.__name__}{problem}")
    return plugin


def _version_problem(interface: type[P], plugin: type[P], distribution: str) -> str | None:
    """Return what is wrong with a plugin's API version, or None.

    The text continues a sentence that begins with the plugin's name. It says which distribution to upgrade.
    """
    version = getattr(plugin, "api_version", None)
    accepted = interface.API_VERSIONS
    oldest = accepted[0]
    newest = accepted[-1]
    this = f"this spec-core accepts {newest if oldest == newest else f'{oldest} to {newest}'}"
    if not isinstance(version, int):
        stated = "states no api_version" if version is None else f"states api_version={version!r}"
        return f"{stated}, {this}; install a matching version of {distribution}"
    if version in accepted:
        return None
    numbers = f"was written for version {version} of spec_core.{interface.__name__}, {this}"
    if version > newest:
        upgrade = "pip install --upgrade spec-core spec-trainer"
        return f"{numbers}, which is older: {upgrade}, or install an older {distribution}"
    return f"{numbers}, which is newer: pip install --upgrade {distribution}"


def _problem(interface: type[P], plugin: type[P], name: str) -> str | None:
    """Return how the class breaks the interface, as the end of a sentence about the plugin, or None."""
    if left := sorted(getattr(plugin, "__abstractmethods__", ())):
        return f" leaves abstract methods undefined: {', '.join(left)}{_unknown_methods(interface, plugin)}"
    if getattr(plugin, "name", None) != name:
        return f".name is {getattr(plugin, 'name', None)!r}, its entry point is called {name!r}"
    if not (inspect.isclass(plugin.Config) and issubclass(plugin.Config, interface.Config)):
        return f".Config is not a subclass of {interface.Config.__name__}"
    if interface is Engine and not isinstance(getattr(plugin, "serving", None), Serving | None):
        return ".serving is neither None nor an object of a subclass of spec_core.Serving"
    return None


def _unknown_methods(interface: type[P], plugin: type[P]) -> str:
    """Return the end of a message, with the public methods of the class that the interface does not have.

    An undefined method may be one of them, if the interface has renamed it or the class misspells it.
    """
    own = [name for name in vars(plugin) if not name.startswith("_") and callable(getattr(plugin, name))]
    unknown = sorted(name for name in own if not hasattr(interface, name))
    return f"; it defines {', '.join(unknown)}, which spec_core.{interface.__name__} lacks" if unknown else ""
