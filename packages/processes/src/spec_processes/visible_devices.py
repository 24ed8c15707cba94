"""Select the devices that a child process sees, by the vendor's environment variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_core.errors import ConfigError


def child_devices(
    variable: str, environ: Mapping[str, str], visible: Sequence[str], first: int, num_devices: int
) -> dict[str, str]:
    """Return the environment variable ``variable`` for a child process, with entries of ``visible``.

    The child gets ``num_devices`` entries from index ``first`` on. ``visible``: the variable's entries for the
    devices that this process sees. Raise ConfigError if there are too few.
    """
    chosen = visible[first : first + num_devices]
    if len(chosen) < num_devices:
        wanted = f"device {first}" if num_devices == 1 else f"{num_devices} devices from {first} on"
        raise ConfigError(
            f"a process was to get {wanted}, but this host shows {len(visible)} "
            f"({variable}={environ.get(variable, 'not set')}); lower train.ranks, engine.replicas or "
            "engine.tensor_parallel, or set the variable"
        )
    return {variable: ",".join(chosen)}
