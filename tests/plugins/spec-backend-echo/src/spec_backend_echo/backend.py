"""EchoBackend: computes on the CPU, brings a pool for samples, and remembers what it was asked for."""

from __future__ import annotations

import logging
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from spec_core import Backend, BackendConfig
from spec_core.errors import ConfigError
from spec_core.records import Availability, Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from spec_core import Placement, ProcessGroup, Rendezvous, Role, Transport

logger = logging.getLogger(__name__)


class EchoConfig(BackendConfig):
    """Section ``backend`` of a run that names this backend: ``backend.threads=4`` works on the command line."""

    threads: int = Field(1, ge=1)
    """OpenMP threads of each child process."""


class EchoBackend(Backend):
    name: ClassVar[str] = "echo"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[BackendConfig]] = EchoConfig
    dist_backend: ClassVar[str] = "gloo"

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        assert isinstance(config, EchoConfig)
        self.threads = config.threads
        self.calls: list[str] = []
        """The calls that this backend has had, in order."""

    @classmethod
    def probe(cls) -> Availability:
        return Availability.of_distribution("torch")

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(dtypes=frozenset({"float32", "bfloat16"}))

    def child_env(self, role: Role, share: float, local_rank: int, num_devices: int = 1) -> Mapping[str, str]:
        self._echo(f"child_env {role} {share:g} {local_rank}")
        return {"OMP_NUM_THREADS": str(self.threads)}

    @contextmanager
    def prepare_host(self, placement: Placement) -> Iterator[None]:
        """Make a directory where a vendor would start its daemon; leaving the block removes it."""
        self._echo(f"prepare_host {placement}")
        with tempfile.TemporaryDirectory(prefix="echo-") as folder:
            (Path(folder) / "placement").write_text(placement)
            yield

    def device(self, local_rank: int) -> torch.device:
        self._echo(f"device {local_rank}")
        import torch

        return torch.device("cpu")

    def process_group(self, rendezvous: Rendezvous, device: torch.device) -> ProcessGroup:
        self._echo(f"process_group {rendezvous.rank} of {rendezvous.world_size}")
        from spec_kit.collectives import GlooProcessGroup

        return GlooProcessGroup(rendezvous)

    def transport(self, placement: Placement) -> Transport:
        self._echo(f"transport {placement}")
        if placement == "disaggregated":
            raise ConfigError(
                "backend 'echo' has one host: set placement.kind to inline or colocated, not disaggregated"
            )
        if placement == "inline":
            from spec_kit.streams import InlineTransport

            return InlineTransport()
        from spec_backend_echo.pool import EchoTransport

        return EchoTransport()

    def _echo(self, call: str) -> None:
        logger.info("echo: %s", call)
        self.calls.append(call)
