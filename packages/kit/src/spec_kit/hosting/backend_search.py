"""Find the backend for a type of device, in an engine's process that has no run's configuration."""

from __future__ import annotations

from spec_core import Backend, plugins
from spec_core.errors import EngineError


def backend_for(device_type: str) -> Backend:
    """Return the installed backend for devices of torch's type ``device_type``, with default options.

    Raise EngineError if there is none.
    """
    names: list[str] = []
    for name, plugin in plugins.load_each(Backend):
        if isinstance(plugin, type) and plugin.device_type == device_type:
            return plugin(plugin.Config())
        names.append(name)
    raise EngineError(
        f"no installed backend has devices of type {device_type!r}; installed are {', '.join(names) or 'none'}"
    )
