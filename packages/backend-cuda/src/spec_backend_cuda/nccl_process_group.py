"""NcclProcessGroup implements device collectives among the members of a rendezvous, over NCCL."""

from __future__ import annotations

from typing import ClassVar

from spec_backend_cuda.device_sharing import gpu_id
from spec_backend_cuda.nccl import SUMMABLE, UNIQUE_ID_BYTES, NcclCommunicator, unique_id
from spec_core import Rendezvous
from spec_core.errors import ProtocolError
from spec_kit.collectives import AgreedProcessGroup, Communicator


class NcclProcessGroup(AgreedProcessGroup):
    """NCCL collectives; every rank needs a separate GPU."""

    library: ClassVar[str] = "NCCL"
    summable = frozenset(SUMMABLE)

    def _device_id(self) -> str:
        return f"GPU {gpu_id(self.device)}"

    def _connect(self, rendezvous: Rendezvous, deadline: float) -> Communicator:
        name = rendezvous.broadcast(unique_id() if self.rank == 0 else None, src=0)
        if len(name) != UNIQUE_ID_BYTES:
            raise ProtocolError(f"rank 0 named the group by {len(name)} bytes, not {UNIQUE_ID_BYTES}")
        communicator = NcclCommunicator()
        self._communicator = communicator  # so that ``abort`` in another thread can end the call below
        communicator.join(name, self.rank, self.world_size, deadline)
        return communicator
