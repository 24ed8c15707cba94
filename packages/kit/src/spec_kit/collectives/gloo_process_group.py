"""GlooProcessGroup is the reference process group for CPU tensors, built on a rendezvous (P5)."""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from spec_core import Rendezvous
from spec_core.errors import DeadlineExceeded, PeerLost
from spec_kit.collectives.gloo_members import prove_membership
from spec_kit.collectives.gloo_ports import gloo_device
from spec_kit.collectives.library_process_group import CollectiveLibrary, LibraryProcessGroup

TAG, ABORT_TAG = 0, 1


class _Gloo:
    """Gloo as a CollectiveLibrary. Calls block until they are done; gloo has one timeout for all calls."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo  # torch's type stubs lack its methods

    def broadcast(self, raw: Tensor, src: int, deadline: float) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        self._gloo.broadcast([raw], options).wait()

    def send(self, raw: Tensor, dst: int, deadline: float) -> None:
        self._gloo.send([raw], dst, TAG).wait()

    def recv(self, raw: Tensor, src: int, deadline: float) -> None:
        self._gloo.recv([raw], src, TAG).wait()

    def all_gather(self, raw: Tensor, gathered: Tensor, deadline: float) -> None:
        self._gloo.allgather([list(gathered.unbind())], [raw]).wait()

    def all_reduce(self, tensor: Tensor, deadline: float) -> None:
        self._gloo.allreduce([tensor]).wait()


class GlooProcessGroup(LibraryProcessGroup):
    """A gloo process group; all ranks must construct it. It listens only on the rendezvous's interface."""

    summable = frozenset(
        {
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
            *(torch.uint8, torch.int8, torch.int32, torch.int64),
        }
    )

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Connect to the other members of the rendezvous and check each member's proof of membership."""
        super().__init__(rendezvous.rank, rendezvous.world_size, torch.device("cpu"))
        self._timeout_s = rendezvous.timeout_s
        self._unusable = ""
        self._gloo: Any = None
        store = rendezvous.store("gloo")
        with self._mapped("build"), gloo_device(rendezvous.interface) as device:
            options = _options(device, rendezvous.timeout_s)
            self._gloo = ProcessGroupGloo(store, self.rank, self.world_size, options)
            prove_membership(self._gloo, store, self._timeout_s)

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        with self._call("barrier", 0) as (library, deadline):
            library.all_reduce(torch.zeros(1), deadline)

    def abort(self) -> None:
        """End the group and unblock every rank that waits (P7)."""
        self._end("it was closed")

    def _end(self, why: str) -> None:
        """Close every connection of the group (P7).

        Gloo's own ``abort`` does nothing (torch 2.13). A receive that times out, though, makes gloo close every
        connection of the group: every pending call fails at once, here and at the peers.
        """
        gloo, self._gloo = self._gloo, None
        if gloo is None:
            return
        self._unusable = why
        if self.world_size > 1:
            peer = (self.rank + 1) % self.world_size
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, ABORT_TAG).wait(dt.timedelta(milliseconds=1))

    @contextlib.contextmanager
    def _call(
        self, name: str, size: int, peer: int | None = None, *, sends: bool = False
    ) -> Generator[tuple[CollectiveLibrary, float]]:
        gloo = self._gloo
        if gloo is None:
            raise PeerLost(
                f"rank {self.rank}: {name} on a group that cannot be used any more: {self._unusable}"
            )
        with self._mapped(name):
            yield _Gloo(gloo), time.monotonic() + self._timeout_s

    @contextlib.contextmanager
    def _mapped(self, call: str) -> Generator[None]:
        """Turn gloo's RuntimeError into DeadlineExceeded if the timeout has passed, else into PeerLost."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.world_size}: {call}"
            self._end(f"{where} failed")  # so that peers that wait for this rank fail, too
            if time.monotonic() - started >= self._timeout_s:
                raise DeadlineExceeded(f"{where}: no answer within {self._timeout_s} s") from error
            raise PeerLost(f"{where}: {error}") from error


def _options(device: Any, timeout_s: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore
    options._devices = [device]
    options._timeout = dt.timedelta(seconds=timeout_s)
    return options
