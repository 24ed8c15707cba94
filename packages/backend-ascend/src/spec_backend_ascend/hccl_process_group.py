"""HcclProcessGroup: device collectives over a rendezvous, by HCCL's own API and outside torch's groups."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch

from spec_backend_ascend.hccl import SUMMABLE, Communicator, root_info
from spec_backend_ascend.notices import Notices, same_device_twice
from spec_backend_ascend.place import place_of
from spec_core.errors import PeerLost, ProtocolError, RunError
from spec_core.process_group import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import Tensor

    from spec_core.rendezvous import Rendezvous

GATHERED = frozenset({torch.uint8, torch.float64})
"""Summed here from everybody's bytes: HcclAllReduce does not add them up."""
COLLECTIVE = ("all", "all")
POLL_S = 1e-3


class HcclProcessGroup(ProcessGroup):
    """Collective to build. Every rank needs a card of its own."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self.device = device
        self._timeout_s = rendezvous.timeout_s
        self._unusable = ""
        self._communicator: Communicator | None = None
        self._issued = torch.npu.Event()
        self._refuse_shared_card(rendezvous)
        self._notices = Notices(rendezvous)
        try:
            self._build(rendezvous)
        except BaseException:
            self.abort()
            raise

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self._check(tensor)
        with self._usable("broadcast") as (communicator, stream):
            if self._met(range(self.world_size), COLLECTIVE, (f"broadcast {src}", tensor.nbytes)):
                communicator.broadcast(tensor.data_ptr(), tensor.nbytes, src, stream)

    def send(self, tensor: Tensor, dst: int) -> None:
        self._check(tensor)
        with self._usable(f"send to rank {dst}") as (communicator, stream):
            if self._met([dst], ("have", "want"), ("message", tensor.nbytes)):
                communicator.send(tensor.data_ptr(), tensor.nbytes, dst, stream)

    def recv(self, tensor: Tensor, src: int) -> None:
        self._check(tensor)
        with self._usable(f"recv from rank {src}") as (communicator, stream):
            if self._met([src], ("want", "have"), ("message", tensor.nbytes)):
                communicator.receive(tensor.data_ptr(), tensor.nbytes, src, stream)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._check(tensor)
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        with self._usable("all_gather") as (communicator, stream):
            if self._met(range(self.world_size), COLLECTIVE, ("all_gather", tensor.nbytes)):
                communicator.all_gather(tensor.data_ptr(), gathered.data_ptr(), tensor.nbytes, stream)
        return list(gathered.unbind())

    def all_reduce(self, tensor: Tensor) -> None:
        self._check(tensor)
        if tensor.dtype in GATHERED:
            parts = self.all_gather(tensor)
            tensor.copy_(torch.stack(parts).sum(0, dtype=tensor.dtype))
            return
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in SUMMABLE:
            raise ProtocolError(
                f"all_reduce cannot sum {tensor.dtype}; it sums {', '.join(sorted(SUMMABLE))}"
            )
        with self._usable("all_reduce") as (communicator, stream):
            if self._met(range(self.world_size), COLLECTIVE, (f"all_reduce {name}", tensor.nbytes)):
                communicator.all_reduce(tensor.data_ptr(), tensor.numel(), SUMMABLE[name], stream)

    def barrier(self) -> None:
        """Of the hosts: what is on the streams is ordered by them."""
        with self._usable("barrier"):
            self._notices.meet(range(self.world_size), COLLECTIVE, ("barrier", 0), self._timeout_s)

    def close(self) -> None:
        """Lets what this rank has issued come to its end first, for as long as the peers are there."""
        deadline = time.monotonic() + self._timeout_s
        while self._communicator is not None and not self._issued.query() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.abort()

    def abort(self) -> None:
        self._end("it was closed")

    def _end(self, why: str) -> None:
        """P7: the end of the notices reaches every rank that waits, here and elsewhere."""
        self._unusable = self._unusable or why
        communicator, self._communicator = self._communicator, None
        self._notices.close()
        if communicator is not None:
            communicator.destroy()

    def _refuse_shared_card(self, rendezvous: Rendezvous) -> None:
        """HCCL would hang or fail late: a communicator wants each card once."""
        place = same_device_twice(rendezvous.all_gather_json(place_of(self.device)))
        if place:
            raise ProtocolError(
                f"two ranks of the group are on {place}; HCCL wants a card of its own for each"
            )

    def _build(self, rendezvous: Rendezvous) -> None:
        torch.npu.set_device(self.device)
        root = rendezvous.broadcast(root_info() if self.rank == 0 else None, src=0)
        self._communicator = Communicator(root, self.rank, self.world_size)
        # HCCL connects in the first call: a group that cannot work is to fail here (P8).
        value = torch.ones(1, device=self.device)
        self.all_reduce(value)
        try:
            total = value.item()
        except RuntimeError as error:  # torch's, for all that fails on the device
            raise PeerLost(f"rank {self.rank}: the first all_reduce failed: {error}") from error
        if total != self.world_size:
            raise PeerLost(f"rank {self.rank}: the first all_reduce of {self.world_size} ranks gave {total}")

    def _met(self, peers: Iterable[int], channels: tuple[str, str], call: tuple[str, int]) -> bool:
        """Whether there is anything to move; then every peer is about to move it."""
        if call[1] == 0:
            return False
        self._notices.meet(peers, channels, call, self._timeout_s)
        return True

    def _check(self, tensor: Tensor) -> None:
        if tensor.device != self.device or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "strided"
            raise ProtocolError(
                f"the tensor is {layout} on {tensor.device}; a contiguous one on {self.device} is wanted"
            )

    @contextlib.contextmanager
    def _usable(self, call: str) -> Generator[tuple[Communicator, int]]:
        """The communicator and the current stream's handle; any failure is the group's end (P6)."""
        communicator = self._communicator
        if communicator is None:
            raise PeerLost(
                f"rank {self.rank}: {call} on a group that cannot be used any more: {self._unusable}"
            )
        try:
            communicator.check()
            stream = torch.npu.current_stream(self.device)
            yield communicator, stream.npu_stream
            self._issued.record(stream)
        except RunError as error:
            self._end(f"{call} failed: {error}")
            raise
