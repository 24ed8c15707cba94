"""Find the reference backend ``cpu``, on which the suites compute, by its entry point like any plugin."""

from __future__ import annotations

from functools import cache

from spec_core import Backend, Kernel, plugins


@cache
def reference_backend() -> Backend:
    """Return the backend ``cpu``, which runs on every machine and which this distribution requires."""
    plugin = plugins.load_available(Backend, "cpu")
    return plugin(plugin.Config())


def reference_kernel(name: str) -> Kernel | None:
    """Return the kernel called ``name`` for the CPU, from the reference backend or a draft; None if none has it."""
    return plugins.find_kernel(reference_backend())(name)
