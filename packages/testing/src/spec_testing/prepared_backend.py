"""PreparedBackend is the reference backend, but records in a folder when ``prepare_host`` is active."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from spec_core import Backend, BackendConfig
from spec_core.errors import RunError
from spec_testing.reference import reference_backend

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    import torch

    from spec_core import Placement, ProcessGroup, Rendezvous, Role, Transport
    from spec_core.records import Availability, Capabilities


class PreparedConfig(BackendConfig):
    """Options of the PreparedBackend."""

    notes: Path
    """Folder with a file for each process that is inside ``prepare_host``; a file ``died`` makes ``check_host``
    fail."""


class PreparedBackend(Backend):
    """Delegates all calls to the reference backend, and records ``prepare_host`` in ``notes``.

    A launcher can construct it on any host from its class and configuration.
    """

    name: ClassVar[str] = "prepared"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[BackendConfig]] = PreparedConfig
    dist_backend: ClassVar[str] = "gloo"

    config: PreparedConfig

    @classmethod
    def probe(cls) -> Availability:
        """Return the result of the reference backend's probe (B2)."""
        return reference_backend().probe()

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Return the capabilities of the reference backend (B3)."""
        return reference_backend().capabilities()

    def child_env(self, role: Role, share: float, local_rank: int, num_devices: int = 1) -> Mapping[str, str]:
        """Return the reference backend's variables, and a variable that names the host's placement (B4)."""
        return {
            **reference_backend().child_env(role, share, local_rank, num_devices),
            "PREPARED": self._prepared,
        }

    _prepared: str = ""

    @contextmanager
    def prepare_host(self, placement: Placement) -> Generator[None]:
        """Create a file in ``notes`` on entry and delete it on exit (B5)."""
        note = self.config.notes / f"prepared-{os.getpid()}"
        note.touch()
        self._prepared = placement
        try:
            yield
        finally:
            self._prepared = ""
            note.unlink()

    def check_host(self) -> None:
        """Raise RunError if the file ``died`` exists in ``notes`` (B5)."""
        if (self.config.notes / "died").exists():
            raise RunError("what the host needs has died, as the suite asked for")

    def device(self, local_rank: int) -> torch.device:
        """Return the device of the reference backend (B6)."""
        return reference_backend().device(local_rank)

    def process_group(self, rendezvous: Rendezvous, device: torch.device) -> ProcessGroup:
        """Return a process group of the reference backend (B8)."""
        return reference_backend().process_group(rendezvous, device)

    def transport(self, placement: Placement) -> Transport:
        """Return a transport of the reference backend (B9)."""
        return reference_backend().transport(placement)
