"""CpuBackend is the reference for other backends and runs on every machine."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from packaging.version import Version

from spec_core import Backend, Placement, Role
from spec_core.records import Availability, Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from spec_core import Kernel, ProcessGroup, Rendezvous, Transport


FP8_SINCE = "2.13"
"""Oldest version of torch with which fp8 products on CPUs were tried."""


class CpuBackend(Backend):
    """Backend for the host's CPU."""

    name: ClassVar[str] = "cpu"
    api_version: ClassVar[int] = 1
    dist_backend: ClassVar[str] = "gloo"

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run the backend, and if not, what to install (B2)."""
        torch = Availability.of_distribution("torch")
        return replace(torch, versions={**torch.versions, "machine": platform.machine()})

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Return the capabilities of this machine's hardware (B3)."""
        version = Availability.of_distribution("torch").versions.get("torch", "0")
        return Capabilities(
            dtypes=frozenset({"float32", "bfloat16"}), fp8=Version(version) >= Version(FP8_SINCE)
        )

    def child_env(self, role: Role, share: float, local_rank: int, num_devices: int = 1) -> Mapping[str, str]:
        """Return the variable that gives a child its share of the host's cores as OpenMP threads (B4).

        The child gets at least one thread.
        """
        import os

        threads = max(1, int(share * len(os.sched_getaffinity(0))))
        return {"OMP_NUM_THREADS": str(threads)}

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a local rank and make it the current one (B6)."""
        import torch

        return torch.device("cpu")

    def process_group(self, rendezvous: Rendezvous, device: torch.device) -> ProcessGroup:
        """Return a process group of the members of ``rendezvous`` (B8)."""
        from spec_kit.collectives import GlooProcessGroup

        return GlooProcessGroup(rendezvous)

    def transport(self, placement: Placement) -> Transport:
        """Return the feature transport for a placement (B9)."""
        if placement == "inline":
            from spec_kit.streams import InlineTransport

            return InlineTransport()
        from spec_kit.streams import SharedMemoryTransport

        return SharedMemoryTransport()

    def kernel(self, name: str) -> Kernel | None:
        """Return the kernel called ``name``, or None (B10)."""
        from spec_backend_cpu.kernels import KERNELS

        return KERNELS.get(name)
