"""A Backend plugin gives access to one kind of hardware.

Contract (``spec_testing.BackendSuite`` quotes the numbers):

B1  ``name`` equals the entry point's name; ``api_version`` is in ``API_VERSIONS``; ``Config`` derives from
    BackendConfig.
B2  ``probe`` is cheap, never raises, opens no device context and allocates no device memory. If the SDK is
    missing, it says which SDK and what to install. The module imports without that SDK and without torch.
B3  ``capabilities`` is frozen and, like ``probe``, touches no device.
B4  ``child_env`` returns what a child process needs in its environment before it starts (visible devices,
    allocator, vendor daemons). It changes nothing: two calls give equal mappings, and ``os.environ`` is unchanged.
    The child sees only its devices: ``device(0)`` in the child is the first device that it was given.
B5  ``prepare_host`` returns a context manager; leaving it, also by an exception, ends all daemons that it started.
    Inside it ``check_host`` raises RunError if one of these daemons has died; ``check_host`` is cheap and never
    waits.
B6  ``device(local_rank)`` is a ``torch.device`` on which ``torch.ones(1)`` works in this process;
    ``device_type`` is its ``torch.device.type``. ``device_id`` is the same in every process of the host, and
    differs between devices.
B7  ``limit_memory`` enforces the fraction if ``capabilities.memory_limit`` is true; otherwise it raises
    ConfigError. A limit is never ignored.
B8  ``process_group`` gives device collectives over a rendezvous, independent of torch's default group.
    Processes whose ``group_settings`` differ never form a group.
B9  ``transport(placement)`` gives the feature transport for a placement; a placement that the hardware does not
    support raises ConfigError.
B10 ``kernel`` returns the kernel of a name (contract: ``spec_core.kernels``), the same kernel at every call. It
    returns None if this backend has no faster kernel of that name.
B11 ``import_env`` is as cheap and as safe as ``probe``, and empty unless torch cannot be imported without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
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
    """A hardware plugin; the module's docstring has the contract."""

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[BackendConfig]] = BackendConfig
    dist_backend: ClassVar[str]
    """Name of the torch.distributed backend for FSDP and Megatron (``gloo``, ``nccl``, ``hccl``)."""
    device_type: ClassVar[str] = "cpu"
    """``torch.device.type`` of the backend's devices (``cpu``, ``cuda``, ``npu``)."""

    def __init__(self, config: BackendConfig) -> None:
        """Store the validated configuration section ``backend``."""
        self.config = config

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run the backend, and if not, what is missing (B2)."""

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """Return what this machine's hardware offers (B3)."""

    @classmethod
    def import_env(cls) -> Mapping[str, str]:
        """Return the environment variables without which ``import torch`` fails on this host (B11).

        Torch imports an installed vendor extension by itself, and fails if the extension cannot be loaded.
        """
        return {}

    @abstractmethod
    def child_env(self, role: Role, share: float, local_rank: int, num_devices: int = 1) -> Mapping[str, str]:
        """Return the environment variables of a child process of ``role`` (B4).

        The child sees ``num_devices`` devices, of which ``local_rank`` is the first. It gets the fraction
        ``share``, in (0, 1], of the compute of each device.
        """

    def prepare_host(self, placement: Placement) -> AbstractContextManager[None]:
        """Return a context manager that starts the daemons that the host needs, and stops them on exit (B5).

        Optional: by default it does nothing.
        """
        return nullcontext()

    def check_host(self) -> None:  # noqa: B027 (a backend that starts nothing has nothing to watch)
        """Raise RunError, naming the daemon, if a daemon that ``prepare_host`` has started has exited (B5)."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Return the device of a local rank, and bind this process to it if the vendor requires that (B6)."""

    def device_id(self, device: torch.device) -> str:
        """Return the vendor's id of a device in printable ASCII; empty if processes cannot compare ids (B6)."""
        return ""

    @abstractmethod
    def process_group(self, rendezvous: Rendezvous, device: torch.device) -> ProcessGroup:
        """Return a process group of the members of ``rendezvous``.

        Raise if its collectives cannot work (B8).
        """

    def group_settings(self) -> str:
        """Return the environment settings, as ``NAME=value``, that all members of a group must share (B8)."""
        return ""

    @abstractmethod
    def transport(self, placement: Placement) -> Transport:
        """Return the transport that sends features from the engine to the trainer (B9)."""

    def limit_memory(self, fraction: float) -> None:
        """Cap this process at ``fraction`` of the device's memory (B7)."""
        raise ConfigError(
            f"backend {self.name!r} cannot limit device memory (asked for a fraction of {fraction})"
        )

    def kernel(self, name: str) -> Kernel | None:
        """Return the kernel called ``name``, or None if plain torch is as fast (B10).

        A draft asks once for each kernel, when it is built.
        """
        return None
