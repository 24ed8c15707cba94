"""The backend that the suites compute on: ``cpu``, found by its entry point like any other plugin."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from spec_core import plugins
from spec_core.backend import Backend

if TYPE_CHECKING:
    from spec_core.kernels import Kernel


@cache
def reference_backend() -> Backend:
    """Return the backend that every machine has, which this distribution requires."""
    plugin = plugins.load_available(Backend, "cpu")
    return plugin(plugin.Config())


def reference_kernel(name: str) -> Kernel | None:
    """Return the kernel for the reference backend's devices, its own or one of an installed draft."""
    return plugins.find_kernel(reference_backend())(name)
