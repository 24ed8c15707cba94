"""GlooProcessGroup: the reference process group, for CPU tensors, built directly on a rendezvous (P5)."""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime as dt
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroupGloo

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_core.process_group import ProcessGroup
from spec_core.streams.gloo_members import closed_afterwards, prove_membership

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from spec_core.rendezvous import Rendezvous

SUMMABLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)

TAG, ABORT_TAG = 0, 1


class GlooProcessGroup(ProcessGroup):
    """Collective to build. Listens on this process's interface to the rendezvous only."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self.device = torch.device("cpu")
        self._timeout_s = rendezvous.timeout_s
        self._unusable = ""
        self._gloo: Any = None  # torch's stubs leave its methods out
        store = rendezvous.store("gloo")
        with self._mapped("build"), closed_afterwards():
            self._gloo = ProcessGroupGloo(store, self.rank, self.world_size, _options(rendezvous))
            prove_membership(self._gloo, store, self._timeout_s)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        raw = self._bytes(tensor)
        with self._usable("broadcast") as gloo:
            if raw.numel():
                options = torch.distributed.BroadcastOptions()
                options.rootRank, options.rootTensor = src, 0
                gloo.broadcast([raw], options).wait()

    def send(self, tensor: Tensor, dst: int) -> None:
        raw = self._bytes(tensor)
        with self._usable(f"send to rank {dst}") as gloo:
            if raw.numel():
                gloo.send([raw], dst, TAG).wait()

    def recv(self, tensor: Tensor, src: int) -> None:
        raw = self._bytes(tensor)
        with self._usable(f"recv from rank {src}") as gloo:
            if raw.numel():
                gloo.recv([raw], src, TAG).wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        raw = self._bytes(tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._usable("all_gather") as gloo:
            if raw.numel():
                gloo.allgather([[self._bytes(part) for part in gathered]], [raw]).wait()
        return gathered

    def all_reduce(self, tensor: Tensor) -> None:
        self._check(tensor)
        if tensor.dtype not in SUMMABLE:
            raise ProtocolError(f"all_reduce cannot sum {tensor.dtype}; it sums {sorted(map(str, SUMMABLE))}")
        with self._usable("all_reduce") as gloo:
            if tensor.numel():
                gloo.allreduce([tensor]).wait()

    def barrier(self) -> None:
        with self._usable("barrier") as gloo:
            gloo.barrier().wait()

    def abort(self) -> None:
        self._end("it was closed")

    def _end(self, why: str) -> None:
        """P7. Gloo's own ``abort`` does nothing (torch 2.13). A receive that times out, though, makes gloo close
        every connection of the group: all that is pending fails at once, here and at the peers."""
        gloo, self._gloo = self._gloo, None
        if gloo is None:
            return
        self._unusable = why
        if self.world_size > 1:
            peer = (self.rank + 1) % self.world_size
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, ABORT_TAG).wait(dt.timedelta(milliseconds=1))

    def _bytes(self, tensor: Tensor) -> Tensor:
        self._check(tensor)
        return tensor.view(-1).view(torch.uint8)

    def _check(self, tensor: Tensor) -> None:
        if tensor.device != self.device or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "strided"
            raise ProtocolError(
                f"the tensor is {layout} on {tensor.device}; a contiguous one on {self.device} is wanted"
            )

    @contextlib.contextmanager
    def _usable(self, call: str) -> Generator[Any]:
        gloo = self._gloo
        if gloo is None:
            raise PeerLost(
                f"rank {self.rank}: {call} on a group that cannot be used any more: {self._unusable}"
            )
        with self._mapped(call):
            yield gloo

    @contextlib.contextmanager
    def _mapped(self, call: str) -> Generator[None]:
        """The one place where gloo's errors become ours: it raises RuntimeError for all, told apart by time."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.world_size}: {call}"
            self._end(f"{where} failed")  # so that the peers that wait for this rank learn of it, too
            if time.monotonic() - started >= self._timeout_s:
                raise DeadlineExceeded(f"{where}: no answer within {self._timeout_s} s") from error
            raise PeerLost(f"{where}: {error}") from error


def _options(rendezvous: Rendezvous) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore
    # Connected when it is built, so that a group that cannot work raises there (P8).
    options._devices = [ProcessGroupGloo.create_device(hostname=rendezvous.interface, lazy_init=False)]
    options._timeout = dt.timedelta(seconds=rendezvous.timeout_s)
    return options
