"""Backend: the hardware plugin.

Contract (``spec_testing.BackendSuite`` quotes the numbers):

B1  ``name`` equals the entry point's name; ``api_version`` is in ``API_VERSIONS``; ``Config`` derives from
    BackendConfig.
B2  ``probe`` is cheap, never raises, opens no device context and allocates no device memory; where the SDK is
    missing it says which one and what to install. The module imports without that SDK and without torch.
B3  ``capabilities`` is frozen and, like ``probe``, touches no device.
B4  ``child_env`` returns what a child process needs in its environment before it starts (visible devices,
    allocator, vendor daemons) and changes nothing itself: two calls give equal mappings, ``os.environ`` stays.
    The child sees its devices alone, so that its own ``device(0)`` is the one that it was given.
B5  ``prepare_host`` is a context manager; leaving it, by an exception too, removes all that it started. Inside it
    ``check_host`` raises RunError once something that it has started has died; it is cheap and never waits.
B6  ``device(local_rank)`` is a ``torch.device`` on which ``torch.ones(1)`` works in this process; ``device_type``
    is torch's word for its kind. ``device_id`` is the same in every process of the host, and another one for another
    device.
B7  ``limit_memory`` enforces the fraction where ``capabilities.memory_limit`` says so, and raises ConfigError
    where not: a limit is never ignored.
B8  ``process_group`` gives device collectives over a rendezvous, independent of torch's default group. Processes
    whose ``group_settings`` differ are put into no group together.
B9  ``transport(placement)`` gives the feature transport for a placement; a placement that the hardware cannot
    do raises ConfigError.
B10 ``kernel`` gives the kernel of a name (``spec_core.kernels`` has its contract), the same at every call, or None
    for a name that this backend does nothing faster for.
B11 ``import_env`` is as cheap and as safe as ``probe``, and empty unless torch cannot be imported without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from spec_core.config import BackendConfig
from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch

    from spec_core.kernels import Kernel
    from spec_core.process_group import ProcessGroup
    from spec_core.records import Availability, Capabilities
    from spec_core.rendezvous import Rendezvous
    from spec_core.transport import Transport

Role = Literal["engine", "trainer"]
Placement = Literal["inline", "colocated", "disaggregated"]


class Backend(ABC):
    """A hardware plugin; the module has the contract."""

    API_VERSIONS: ClassVar[range] = range(2, 3)
    """Versions of this interface that are accepted; newest first: 2, of the first release."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """The version that the plugin was written for."""
    Config: ClassVar[type[BackendConfig]] = BackendConfig
    dist_backend: ClassVar[str]
    """Name of torch's backend for the process groups of FSDP and Megatron (``gloo``, ``nccl``, ``hccl``)."""
    device_type: ClassVar[str] = "cpu"
    """``torch.device.type`` of its devices (``cpu``, ``cuda``, ``npu``)."""

    def __init__(self, config: BackendConfig) -> None:
        """Keep the validated section of the configuration."""
        self.config = config

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run it, and if not, what is missing (B2)."""

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """Return what this machine's hardware offers (B3)."""

    @classmethod
    def import_env(cls) -> Mapping[str, str]:
        """Return what a process on this host, of whatever backend, needs to import torch at all (B11).

        Torch loads the vendor's extension by itself, and fails where that is installed and cannot be loaded.
        """
        return {}

    @abstractmethod
    def child_env(self, role: Role, share: float, local_rank: int, num_devices: int = 1) -> Mapping[str, str]:
        """Return the variables of a child of ``role`` that gets ``share`` (0..1] of a device (B4).

        The device is ``local_rank``, or ``num_devices`` devices from there on.
        """

    @abstractmethod
    def prepare_host(self, placement: Placement) -> AbstractContextManager[None]:
        """Return a context that starts what the host needs (a sharing daemon, say) and stops it again (B5)."""

    def check_host(self) -> None:  # noqa: B027 (a backend that starts nothing has nothing to watch)
        """Raise RunError, naming it, if a daemon started by ``prepare_host`` has exited (B5)."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Return the device of a local rank; bind this process to it where the vendor wants that (B6)."""

    def device_id(self, device: torch.device) -> str:
        """Return the vendor's name of a device, printable ASCII; empty where processes cannot compare them (B6)."""
        return ""

    @abstractmethod
    def process_group(self, rendezvous: Rendezvous, device: torch.device) -> ProcessGroup:
        """Return collectives among the members of ``rendezvous``. Raise if they cannot work (B8)."""

    def group_settings(self) -> str:
        """Return what all members of a process group need alike in their environments, as ``NAME=value`` (B8)."""
        return ""

    @abstractmethod
    def transport(self, placement: Placement) -> Transport:
        """Return how features travel from engine to trainer (B9)."""

    def limit_memory(self, fraction: float) -> None:
        """Cap this process at ``fraction`` of the device's memory (B7)."""
        raise ConfigError(
            f"backend {self.name!r} cannot limit device memory (asked for a fraction of {fraction})"
        )

    def kernel(self, name: str) -> Kernel | None:
        """Return a kernel that is faster than plain torch, or None; a draft asks once, when it is built (B10)."""
        return None
