"""HcclProcessGroup implements device collectives among the members of a rendezvous, over HCCL.

It does not use ``torch.distributed``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from spec_backend_ascend.hccl import SUMMABLE, HcclCommunicator, root_info
from spec_backend_ascend.visible_devices import card_id
from spec_core import Rendezvous
from spec_core.errors import PeerLost
from spec_kit.collectives import AgreedProcessGroup, Communicator

GATHERED = frozenset({torch.uint8, torch.float64})
"""Dtypes that HcclAllReduce cannot sum. The tensors of all ranks are gathered as bytes and summed by this
module."""


class HcclProcessGroup(AgreedProcessGroup):
    """HCCL collectives; every rank needs a separate card."""

    library: ClassVar[str] = "HCCL"
    summable = frozenset(getattr(torch, name) for name in SUMMABLE) | GATHERED

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum the tensor over the ranks, in place. Dtypes in ``GATHERED`` are gathered and summed locally."""
        if tensor.dtype in GATHERED:
            tensor.copy_(torch.stack(self.all_gather(tensor)).sum(0, dtype=tensor.dtype))
        else:
            super().all_reduce(tensor)

    def _device_id(self) -> str:
        return card_id(self.device)

    def _connect(self, rendezvous: Rendezvous, deadline: float) -> Communicator:
        root = rendezvous.broadcast(root_info() if self.rank == 0 else None, src=0)
        communicator = HcclCommunicator(root, self.rank, self.world_size)
        self._communicator = communicator
        # HCCL connects in the first call, so that a group that cannot work fails here (P8).
        value = torch.ones(1, device=self.device)
        self.all_reduce(value)
        try:
            total = value.item()
        except RuntimeError as error:  # torch's error for any failure on the device
            raise PeerLost(f"rank {self.rank}: the first all_reduce failed: {error}") from error
        if total != self.world_size:
            raise PeerLost(f"rank {self.rank}: the first all_reduce of {self.world_size} ranks gave {total}")
        return communicator
