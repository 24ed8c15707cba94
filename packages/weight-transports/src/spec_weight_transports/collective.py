"""CollectiveTransport: the publisher broadcasts buckets to all ranks of a replica, by the backend's process group."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from typing import TYPE_CHECKING, ClassVar

from spec_core import Rendezvous, WeightReceiver, WeightSender, WeightTransport
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError
from spec_core.weight_sync import BucketPlan, bucket_size
from spec_weight_transports.host import elsewhere, host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from spec_core import Backend, Manifest, ProcessGroup

_LOOPBACK = "127.0.0.1:0"
"""A process group needs its members on one host (R7)."""


class CollectiveTransport(WeightTransport):
    """The weight transport ``collective``: each update of each replica has a group of its own."""

    name: ClassVar[str] = "collective"
    api_version: ClassVar[int] = 2

    def place(self, device: torch.device) -> str:
        """Return this host, and the device where it has a name of its own."""
        return f"{host_name()} {_device_id(device)}"

    def obstacle(self, place: str, device: torch.device) -> str:
        """Return why there can be no group: another host, or one device for both."""
        host, _, device_id = place.partition(" ")
        if device_id and device_id == _device_id(device):
            return "it is on the sender's own device, and a group takes each device once"
        return elsewhere(host)

    def receiver(self, manifest: Manifest, device: torch.device) -> WeightReceiver:
        """Return an end that joins the sender's group."""
        return _CollectiveReceiver(_Membership(self.backend, device), self._plan(manifest), device)

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
    ) -> WeightSender:
        """Return an end that makes a group with all receivers."""
        membership = _Membership(self.backend, device)
        return _CollectiveSender(membership, self._plan(manifest), weights, len(receivers), device)

    def _plan(self, manifest: Manifest) -> BucketPlan:
        return BucketPlan.of(manifest, self.config.bucket_bytes)


class _Membership:
    """One end's part in the group of one update; any thread may end it."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._lock = threading.Lock()
        self._ends: list[Callable[[], None]] = []
        self._closed = False

    def meet(self, address: str, rank: int, world_size: int, token: str, deadline: float) -> Rendezvous:
        """Return this end's rendezvous, which nobody has joined yet."""
        left_s = max(1e-3, deadline - time.monotonic())
        rendezvous = Rendezvous(address, rank, world_size, token, left_s)
        self._end_with(rendezvous.close)
        return rendezvous

    @contextlib.contextmanager
    def group(self, rendezvous: Rendezvous, deadline: float) -> Generator[ProcessGroup]:
        """Yield the group of all who join. It ends at the deadline; all members leave it together."""
        import torch

        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.close)
        timer.start()
        try:
            rendezvous.join()
            group = self._backend.process_group(rendezvous, self._device)
            self._end_with(group.abort)
            yield group
            torch.get_device_module(self._device).synchronize()
            rendezvous.barrier()  # a group ends for all when one leaves it
        except RunError as error:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the update was not over at its deadline") from error
            raise
        finally:
            timer.cancel()
            self.close()

    def close(self) -> None:
        """Leave the group; who waits in it gets PeerLost."""
        with self._lock:
            self._closed = True
            ends, self._ends = self._ends, []
        for end in reversed(ends):
            end()

    def _end_with(self, end: Callable[[], None]) -> None:
        """Have ``close`` call ``end``, also where it came first."""
        with self._lock:
            if not self._closed:
                self._ends.append(end)
                return
        end()
        raise PeerLost("this end of the update was closed")


class _CollectiveReceiver(WeightReceiver):
    """Ranks of the group from 1 on."""

    def __init__(self, membership: _Membership, plan: BucketPlan, device: torch.device) -> None:
        self._membership, self._plan, self._device = membership, plan, device

    def receive(self, sender: str, deadline: float) -> Iterator[tuple[str, Tensor]]:
        address, rank, world_size, token = json.loads(sender)
        rendezvous = self._membership.meet(address, rank, world_size, token, deadline)
        with self._membership.group(rendezvous, deadline) as group:
            yield from self._plan.unpack(self._buckets(group))

    def close(self) -> None:
        self._membership.close()

    def _buckets(self, group: ProcessGroup) -> Generator[Tensor]:
        import torch

        memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8, device=self._device)
        for pieces in self._plan.pieces:
            bucket = memory[: bucket_size(pieces)]
            group.broadcast(bucket, src=0)
            yield bucket


class _CollectiveSender(WeightSender):
    """Rank 0 of the group."""

    def __init__(
        self,
        membership: _Membership,
        plan: BucketPlan,
        weights: Mapping[str, Tensor],
        num_receivers: int,
        device: torch.device,
    ) -> None:
        self._membership, self._plan, self._weights, self._device = membership, plan, weights, device
        self._world_size = 1 + num_receivers
        self._rendezvous: Rendezvous | None = None

    def open(self, deadline: float) -> Sequence[str]:
        token = secrets.token_hex(16)
        rendezvous = self._membership.meet(_LOOPBACK, 0, self._world_size, token, deadline)
        self._rendezvous = rendezvous
        return [
            json.dumps([rendezvous.address, rank, self._world_size, token])
            for rank in range(1, self._world_size)
        ]

    def send(self, deadline: float) -> None:
        import torch

        if self._rendezvous is None:
            raise ProtocolError("open the sender first")
        with self._membership.group(self._rendezvous, deadline) as group:
            memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8, device=self._device)
            for bucket in self._plan.pack(self._weights, memory):
                group.broadcast(bucket, src=0)

    def close(self) -> None:
        self._membership.close()


def _device_id(device: torch.device) -> str:
    """Return the vendor's name of the device, where it gives one that processes can compare."""
    import torch

    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return "" if properties is None else str(getattr(properties(device), "uuid", ""))
