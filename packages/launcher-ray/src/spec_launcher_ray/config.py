"""RayConfig: section ``launcher`` of a run that names this launcher."""

from __future__ import annotations

from pydantic import Field

from spec_core import LauncherConfig


class RayConfig(LauncherConfig):
    """Which cluster, which of its hosts, and how workers are spread over them."""

    name: str = "ray"
    """Who starts the processes; a launcher plugin."""
    address: str | None = None
    """Running cluster, as HOST:PORT or auto; by default that of the variable RAY_ADDRESS, without that a
    cluster that is started on this host for the run."""
    hosts: tuple[str, ...] = ()
    """Addresses or names of the hosts to use, in this order; by default all, sorted by address."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that a host must have, as ray start --labels gives them."""
    spread: bool = False
    """Workers take the devices of all hosts in turns, in place of one host after the other."""
    resources_s: float = Field(300.0, gt=0, le=1e6)
    """Longest wait until devices that others use are free."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every worker, besides those of the host's Ray."""
