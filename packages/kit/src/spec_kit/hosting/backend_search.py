"""Find the backend for a type of device, in an engine's process that has no run's configuration."""

from __future__ import annotations

from spec_core import plugins
from spec_core.backend import Backend
from spec_core.errors import EngineError


def backend_for(device_type: str) -> Backend:
    """Return the installed backend for devices of torch's type ``device_type``, with default options.

    Raise EngineError if there is none.
    """
    found = dict(plugins.load_each(Backend))
    for plugin in found.values():
        if isinstance(plugin, type) and plugin.device_type == device_type:
            return plugin(plugin.Config())
    raise EngineError(
        f"no installed backend has devices of type {device_type!r}; installed are {', '.join(found) or 'none'}"
    )
