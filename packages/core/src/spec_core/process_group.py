"""A ProcessGroup has the device-side collectives of the members of a rendezvous.

It connects engines with trainers, also to update draft weights. FSDP and Megatron use torch's own groups
(``Backend.dist_backend``) instead.

Contract (``spec_testing.ProcessGroupSuite`` quotes the numbers):

P1  Results equal those of the gloo reference, bit for bit for data movement. Tensors travel as uint8 if the
    vendor's library lacks their dtype, so every torch dtype and zero-sized tensors work for broadcast, send, recv,
    all_gather.
P2  ``all_reduce`` sums float16, bfloat16, float32, float64, uint8, int8, int32 or int64 in place. Any other
    dtype raises ProtocolError on the rank that asks, before anything is sent.
P3  Calls are ordered on the current stream; no call synchronises the device with the host.
P4  Tensors must be contiguous and on the group's device; others raise ProtocolError before anything is sent.
P5  The group is independent of torch's default group: both may exist, and neither affects the other.
P6  A dead peer raises PeerLost, a silent one DeadlineExceeded, within ``timeout_s`` of the rendezvous,
    counted from the call. The group is unusable afterwards: the peers may disagree on what has been done.
P7  ``abort`` may be called from another thread; it unblocks this process with PeerLost, and the peers too.
P8  Building a group that cannot work raises an error. After ``close``, ``abort`` or an error of P6 every call raises.
P9  ``close`` is idempotent and leaves no socket and no thread.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from spec_core.resource import Resource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ProcessGroup(Resource):
    """Collectives among the ranks of one group; the module's docstring has the contract."""

    rank: int
    world_size: int
    device: torch.device

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy the tensor of rank ``src`` into the tensor of every rank."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a tensor to the rank ``dst``, which calls ``recv`` with the same shape and dtype."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive into ``tensor`` the tensor that rank ``src`` sends."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order; all have the same shape and dtype."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum the tensor over the ranks, in place (P2)."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called ``barrier``."""

    @abstractmethod
    def abort(self) -> None:
        """End the group and unblock every rank that waits; any thread may call it (P7)."""

    def close(self) -> None:
        """Close the group, without waiting for the other ranks (P9)."""
        self.abort()
