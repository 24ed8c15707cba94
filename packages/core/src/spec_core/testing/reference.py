"""The backend that the suites compute on: ``cpu``, found by its entry point like any other plugin."""

from __future__ import annotations

from functools import cache

from spec_core import plugins
from spec_core.backend import Backend
from spec_core.config import BackendConfig


@cache
def reference_backend() -> Backend:
    """Return the backend that every machine has, the default of a configuration."""
    plugin = plugins.load_available(Backend, BackendConfig().name)
    return plugin(plugin.Config())
