"""Find plugins by their entry points and load them; a plugin is checked before it is called (``plugin_checks``).

No other module looks for plugins. Plugins of this repository are loaded like third parties' plugins.
This module does not import torch; a plugin's entry-point module must import without torch and its vendor's SDK.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from importlib import metadata
from typing import Any, cast

from spec_core.backend import Backend
from spec_core.errors import (
    PluginConflict,
    PluginError,
    PluginImportFailed,
    PluginInvalid,
    PluginNotFound,
    PluginUnavailable,
    first_line,
)
from spec_core.foreign import cause
from spec_core.kernels import FindKernel, Kernel
from spec_core.plugin_checks import INTERFACES, P, checked_plugin
from spec_core.plugin_records import PluginRecord, entry_points, plugin_records
from spec_core.records import Availability
from spec_core.target_type import TargetType
from spec_core.validation import suggestion
from spec_core.wording import shown

_KERNELS = "spec_core.kernels"
"""Entry-point group of kernels; an entry point's name is ``DEVICE_TYPE:NAME``."""
_TARGET_TYPES = "spec_core.target_types"
"""Entry-point group of target types; an entry point's name is the ``model_type`` of a config.json."""


def required_by(distribution: str) -> set[str]:
    """Return the names of the distributions that ``distribution`` requires, its extras included."""
    return _names_in(metadata.requires(distribution))


def kind_of(interface: type) -> str:
    """Return the kind of plugin that an interface is for, such as "engine" or "weight_transport"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", interface.__name__).lower()


def installed(interface: type[P]) -> list[PluginRecord]:
    """Return every entry point of the interface's group, sorted by name, duplicates included."""
    return plugin_records(_group(interface), kind_of(interface))


def unknown_groups() -> list[PluginRecord]:
    """Return the entry points in unknown groups whose names begin with this project's name.

    No command finds such plugins. ``PluginRecord.kind`` is the group's name.
    """
    known = _groups()
    unknown = [record for record in entry_points() if record.kind not in known]
    found = {(record.kind, record.name, record.distribution): record for record in unknown}
    return [found[key] for key in sorted(found)]


def unknown_group_problem(group: str) -> str:
    """Return the message that no entry-point group is called ``group``, with the name probably meant."""
    return f"there is no such kind of plugin{suggestion(group, _groups())}"


def packages() -> set[str]:
    """Return the top-level packages of all installed plugins. The plugins' logger names begin with these."""
    groups = set(map(_group, INTERFACES))
    points = [record.entry_point for record in entry_points() if record.kind in groups]
    return {point.module.partition(".")[0] for point in points}


def load(interface: type[P], name: str) -> type[P]:
    """Return the plugin class called ``name``. Raise a PluginError that says why it cannot be loaded."""
    return load_record(interface, find(interface, name))


def load_available(interface: type[P], name: str) -> type[P]:
    """Return the plugin class called ``name``.

    Raise PluginUnavailable if its probe says that it cannot run here.
    """
    record = find(interface, name)
    plugin = load_record(interface, record)
    availability = _probe(plugin, record)
    if not availability.ok:
        raise PluginUnavailable(
            f"{record.kind} {name!r} ({record.owner}) cannot run here: {availability.reason}"
        )
    return plugin


def availability(interface: type[P], name: str) -> Availability:
    """Return the result of the probe of the plugin ``name``. Raise a PluginError if it cannot be loaded."""
    record = find(interface, name)
    return _probe(load_record(interface, record), record)


def load_each(
    interface: type[P], names: Container[str] | None = None
) -> Iterator[tuple[str, type[P] | PluginError]]:
    """Yield every installed plugin's name with its class, or with the error that loading it raised.

    ``names``: the only plugins to import; None means all. An import may take minutes.
    """
    for name in sorted({record.name for record in installed(interface)}):
        if names is not None and name not in names:
            continue
        try:
            yield name, load(interface, name)
        except PluginError as error:
            yield name, error


def find(interface: type[P], name: str) -> PluginRecord:
    """Return the entry point called ``name``. Raise PluginNotFound for none, PluginConflict for several."""
    records = installed(interface)
    if (record := _only(records, name)) is None:
        raise PluginNotFound(_not_found(kind_of(interface), name, [record.name for record in records]))
    return record


def find_kernel(backend: Backend) -> FindKernel:
    """Return a function that maps a name to the kernel for ``backend``, or to None if there is none.

    The function looks for a kernel of the backend, then for an entry point for the backend's ``device_type``. It
    raises a PluginError for an entry point that is no function.
    """
    records = plugin_records(_KERNELS, "kernel")

    def find(name: str) -> Kernel | None:
        if (kernel := backend.kernel(name)) is not None:
            return kernel
        record = _only(records, f"{backend.device_type}:{name}")
        return None if record is None else _load_kernel(record)

    return find


def find_target_type(name: str, own: Mapping[str, TargetType | str]) -> TargetType | str | None:
    """Return the target type ``name``, from the table ``own`` or an entry point; None if there is none.

    Raise a PluginError if the entry point is no target type, or if ``own`` has a type of the same name.
    """
    record = _only(plugin_records(_TARGET_TYPES, "target_type"), name)
    if record is None:
        return own.get(name)
    if name in own:
        raise PluginConflict(f"{record.what}: this type is known without it; uninstall {record.distribution}")
    return _load_target_type(record)


def _load_target_type(record: PluginRecord) -> TargetType | str:
    found = _import(record)
    if isinstance(found, TargetType):
        return found.guarded(record.what)
    if not isinstance(found, str):
        source = record.entry_point.value
        raise PluginInvalid(
            f"{record.what}: {source} is no spec_core.TargetType, nor the type of a text model"
        )
    return found


def _load_kernel(record: PluginRecord) -> Kernel:
    kernel = _import(record)
    if not callable(kernel):
        raise PluginInvalid(f"{record.what}: {record.entry_point.value} is no function")
    return kernel


def _only(records: list[PluginRecord], name: str) -> PluginRecord | None:
    """Return the record called ``name``, or None. Raise PluginConflict if there are two."""
    matches = [record for record in records if record.name == name]
    if len(matches) > 1:
        owners = " and ".join(sorted(record.owner for record in matches))
        raise PluginConflict(f"{matches[0].kind} {name!r} is provided by {owners}; uninstall one of them")
    return matches[0] if matches else None


def load_record(interface: type[P], record: PluginRecord) -> type[P]:
    """Return the class that an entry point names. Raise a PluginError if it does not fulfil the interface."""
    return checked_plugin(interface, _import(record), record)


def _import(record: PluginRecord) -> Any:
    try:
        return record.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may even call exit
        text = cause(error)
        name = type(error).__name__
        problem = text if text.startswith(name) else f"{name}: {text}"
        source = record.entry_point.value
        raise PluginImportFailed(f"{record.what} does not import ({source}): {problem}") from error


def listed() -> list[PluginRecord]:
    """Return the entry points of every kind of plugin, then the entry points of target types."""
    plugins = [record for interface in INTERFACES for record in installed(interface)]
    return [*plugins, *plugin_records(_TARGET_TYPES, "target_type")]


def load_listed(record: PluginRecord) -> Any:
    """Return the plugin class or the target type that ``record`` names.

    Raise a PluginError if it is invalid or its name is not unique.
    """
    _only(plugin_records(record.entry_point.group, record.kind), record.name)
    interface = next((interface for interface in INTERFACES if kind_of(interface) == record.kind), None)
    return _load_target_type(record) if interface is None else load_record(interface, record)


def status(record: PluginRecord) -> tuple[str, str, int | None]:
    """Return a plugin's status (``ok``, ``unavailable``, ``broken``), the reason and the API version.

    Never raises. The API version is None for a target type or a broken plugin.
    """
    try:
        plugin = load_listed(record)
        if isinstance(plugin, TargetType | str):
            return "ok", "", None
        availability = _probe(plugin, record)
    except PluginError as error:
        return "broken", str(error), None
    return ("ok" if availability.ok else "unavailable"), availability.reason, plugin.api_version


def _probe(plugin: type[P], record: PluginRecord) -> Availability:
    try:
        found = cast("object", plugin.probe())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third party's probe may raise anything, although it must not
        raise PluginInvalid(
            f"{record.what}: its probe raised {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(found, Availability):
        raise PluginInvalid(f"{record.what}: its probe returned {shown(found)}, expected Availability")
    return found


def _not_found(kind: str, name: str, names: list[str]) -> str:
    known = sorted(set(names))
    hint = suggestion(name, known) if known else " (none is installed)"
    installed = f"installed: {', '.join(known) or 'none'}"
    return f"no {kind} plugin is called {name!r}{hint}; {installed}{_remedy(f'spec-{kind}-{name}'.replace('_', '-'))}"


def _remedy(package: str) -> str:
    """Return advice on how to install or upgrade the distribution ``package``; empty if none is known."""
    distributions = list(metadata.distributions())
    for distribution in distributions:
        if distribution.name == package:
            found = f"{package} {distribution.version} is installed but does not provide it yet"
            return f"; {found}: pip install --upgrade {package}"
    offered = set[str]().union(*(_names_in(distribution.requires) for distribution in distributions))
    return f"; pip install {package}" if package in offered else ""


def _names_in(requirements: list[str] | None) -> set[str]:
    return {found[0] for word in requirements or () if (found := re.match(r"[\w.-]+", word))}


def _group(interface: type[P]) -> str:
    """Return the group of the interface's entry points."""
    kind = kind_of(interface)
    return f"spec_core.{kind[:-1]}ies" if kind.endswith("y") else f"spec_core.{kind}s"


def _groups() -> list[str]:
    """Return the entry-point groups that this project reads."""
    return [*map(_group, INTERFACES), _KERNELS, _TARGET_TYPES]
