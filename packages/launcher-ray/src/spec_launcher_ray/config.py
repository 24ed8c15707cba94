"""RayConfig is the section ``launcher`` of a run that uses the launcher ``ray``."""

from __future__ import annotations

from pydantic import Field

from spec_core import LauncherConfig
from spec_core.errors import ConfigError

_RESOURCES = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
"""Device type -> Ray's resource name."""


class RayConfig(LauncherConfig):
    """Options of the launcher ``ray``: the cluster, the hosts to use, and the placement of workers."""

    name: str = "ray"
    """Name of the launcher plugin, which starts the processes."""
    address: str | None = None
    """Address of a running cluster, as HOST:PORT or auto. By default the address in the variable RAY_ADDRESS; if it
    is not set, a cluster is started on this host for the run."""
    hosts: tuple[str, ...] = ()
    """Addresses or names of the hosts to use, in this order; by default all, sorted by address."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels that a host must have to be used (``ray start --labels``)."""
    resource: str | None = Field(None, min_length=1)
    """Name of the Ray resource that counts the backend's devices; by default Ray's name for their type: CPU, GPU or
    NPU."""
    spread: bool = False
    """Whether workers are spread over the hosts in turn. By default one host is filled after the other."""
    resources_s: float = Field(300.0, gt=0, le=1e6)
    """Longest wait, in seconds, until devices that others use are free."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every worker, in addition to the variables of Ray on its host."""

    def resource_of(self, device_type: str) -> str:
        """Return Ray's resource name for a device type.

        Raise ConfigError if it is neither configured nor known.
        """
        resource = self.resource or _RESOURCES.get(device_type)
        if resource is None:
            raise ConfigError(
                f"Ray has no resource of its own for devices of type {device_type!r}; set launcher.resource to the "
                "name of one that the hosts of the cluster offer"
            )
        return resource
