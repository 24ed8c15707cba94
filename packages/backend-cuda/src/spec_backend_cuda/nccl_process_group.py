"""NcclProcessGroup: device collectives among the members of a rendezvous.

NCCL by itself notices neither that a peer is gone nor what a peer asks for: it waits on the device. So every call is
first agreed on host to host, by a gloo group of the same members: there a dead, silent or mistaken peer shows, within
the timeout, while nothing has been queued. Then NCCL's call is queued, and the host goes on. A peer that dies between
the two leaves the stream waiting until this group's next call, ``abort`` or ``close``.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from typing import TYPE_CHECKING

import torch

from spec_backend_cuda.nccl import SUMMABLE, UNIQUE_ID_BYTES, Communicator, unique_id
from spec_core.errors import ConfigError, PeerLost, ProtocolError, RunError
from spec_core.process_group import ProcessGroup
from spec_core.streams.gloo_process_group import GlooProcessGroup

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from spec_core.rendezvous import Rendezvous

SETUP_S = 20.0
"""At least, for NCCL's own part of a call whose peers have all said that they make it: it sets up communicators and
connections when they are first used, which takes seconds on a busy host, whatever a call's timeout."""
_ASK_AGAIN_S = 1e-3


class NcclProcessGroup(ProcessGroup):
    """Collective to build. ConfigError where two ranks are on one GPU, which NCCL cannot do."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rendezvous.rank, rendezvous.world_size, device
        self._timeout_s = rendezvous.timeout_s
        self._issue = threading.Lock()
        """NCCL's calls of one communicator come from one thread at a time."""
        self._comm: Communicator | None = None
        self._hosts: GlooProcessGroup | None = None
        self._queued = torch.cuda.Event()
        """Recorded after the last call."""
        _refuse_shared_devices(rendezvous, device)
        name = rendezvous.broadcast(unique_id() if self.rank == 0 else None, src=0)
        if len(name) != UNIQUE_ID_BYTES:
            raise ProtocolError(f"rank 0 named the group by {len(name)} bytes, not {UNIQUE_ID_BYTES}")
        self._hosts = GlooProcessGroup(rendezvous)
        try:
            with torch.cuda.device(device):
                self._comm = Communicator()
                self._comm.join(name, self.rank, self.world_size, self._deadline())
        except BaseException:
            self.abort()
            raise

    def broadcast(self, tensor: Tensor, src: int) -> None:
        raw = self._bytes(tensor)
        with self._agreed(f"broadcast {src}", raw.numel()) as (comm, deadline):
            if raw.numel():
                comm.broadcast(raw, src, deadline)

    def send(self, tensor: Tensor, dst: int) -> None:
        raw = self._bytes(tensor)
        with self._agreed(f"send to rank {dst}", raw.numel(), dst, speaks=True) as (comm, deadline):
            if raw.numel():
                comm.send(raw, dst, deadline)

    def recv(self, tensor: Tensor, src: int) -> None:
        raw = self._bytes(tensor)
        with self._agreed(f"recv from rank {src}", raw.numel(), src) as (comm, deadline):
            if raw.numel():
                comm.recv(raw, src, deadline)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        raw = self._bytes(tensor)
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        with self._agreed("all_gather", raw.numel()) as (comm, deadline):
            if raw.numel():
                comm.all_gather(raw, gathered, deadline)
        return list(gathered.unbind())

    def all_reduce(self, tensor: Tensor) -> None:
        self._check(tensor)
        if tensor.dtype not in SUMMABLE:
            raise ProtocolError(f"all_reduce cannot sum {tensor.dtype}; it sums {sorted(map(str, SUMMABLE))}")
        with self._agreed(f"all_reduce {tensor.dtype}", tensor.numel()) as (comm, deadline):
            if tensor.numel():
                comm.all_reduce(tensor, deadline)

    def barrier(self) -> None:
        with self._agreed("barrier", 0):
            pass

    def abort(self) -> None:
        """Both halves: the agreement, which unblocks the hosts, and what is queued on the devices."""
        if self._hosts is not None:
            self._hosts.abort()
        if self._comm is not None:
            self._comm.abort()

    def close(self) -> None:
        """What is queued is done first, if it is within the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while self._comm and not (self._comm.error() or self._queued.query()) and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_S)
        self.abort()

    @contextlib.contextmanager
    def _agreed(
        self, call: str, size: int, peer: int | None = None, *, speaks: bool = False
    ) -> Generator[tuple[Communicator, float]]:
        """Returns when everybody concerned, all or one peer, makes this call with this size; yields what to make it
        with. Of two, the one that ``speaks`` does so first."""
        if self._hosts is None or self._comm is None:
            raise PeerLost(f"rank {self.rank}: {call} on a group that was never built")
        with self._issue, torch.cuda.device(self.device):
            try:
                if peer is None:
                    self._ask_all(self._hosts, call, size)
                else:
                    self._ask_peer(self._hosts, size, peer, speaks)
                if reason := self._comm.error():
                    raise PeerLost(f"rank {self.rank} of {self.world_size}: {call}: {reason}")
                yield self._comm, self._deadline()
            except RunError:
                self.abort()
                raise
            self._queued.record()

    def _deadline(self) -> float:
        return time.monotonic() + max(self._timeout_s, SETUP_S)

    def _ask_all(self, hosts: GlooProcessGroup, call: str, size: int) -> None:
        mine = torch.tensor([zlib.crc32(call.encode()), size])
        for rank, theirs in enumerate(hosts.all_gather(mine)):
            if not torch.equal(mine, theirs):
                raise ProtocolError(
                    f"rank {self.rank} makes a {call} of {size} elements, rank {rank} something else"
                )

    def _ask_peer(self, hosts: GlooProcessGroup, size: int, peer: int, speaks: bool) -> None:
        mine, theirs = torch.tensor([size]), torch.empty(1, dtype=torch.int64)
        if speaks:
            hosts.send(mine, peer)
        hosts.recv(theirs, peer)
        if not speaks:
            hosts.send(mine, peer)
        if size != int(theirs):
            raise ProtocolError(f"rank {self.rank} has {size} bytes for rank {peer}'s {int(theirs)}")

    def _bytes(self, tensor: Tensor) -> Tensor:
        self._check(tensor)
        return tensor.view(-1).view(torch.uint8)

    def _check(self, tensor: Tensor) -> None:
        if tensor.device != self.device or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "strided"
            raise ProtocolError(
                f"the tensor is {layout} on {tensor.device}; a contiguous one on {self.device} is wanted"
            )


def _refuse_shared_devices(rendezvous: Rendezvous, device: torch.device) -> None:
    uuids = rendezvous.all_gather_json(str(torch.cuda.get_device_properties(device).uuid))
    for rank, uuid in enumerate(uuids):
        if (other := uuids.index(uuid)) != rank:
            raise ConfigError(
                f"ranks {other} and {rank} are both on GPU {uuid}, which NCCL cannot do; give each a GPU of its own "
                "(processes of one GPU hand features over with placement.kind=colocated)"
            )
