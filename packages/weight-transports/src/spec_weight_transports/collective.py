"""CollectiveTransport: the publisher broadcasts buckets to all ranks of a replica, by the backend's process group."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core import Rendezvous, WeightReceiver, WeightSender, WeightTransport
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError
from spec_core.weight_sync import BucketPlan, bucket_size
from spec_weight_transports.host import elsewhere, host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from spec_core import Backend, Manifest, ProcessGroup, WeightTransportConfig

_LOOPBACK = "127.0.0.1:0"
"""A process group needs its members on one host (R7)."""


class CollectiveTransport(WeightTransport):
    """The weight transport ``collective``: each update of each replica has a group of its own."""

    name: ClassVar[str] = "collective"
    api_version: ClassVar[int] = 2

    def __init__(self, config: WeightTransportConfig, backend: Backend) -> None:
        """Keep the options; streams come with the first update."""
        super().__init__(config, backend)
        self._streams: list[_OwnStream] = []
        """Those of updates that are over; torch never gives a stream back."""

    def place(self, device: torch.device) -> str:
        """Return this host, why its rank can be in no group, and the device where it has a name of its own."""
        hindrance = self._hindrance(device)
        return "|".join([host_name(), hindrance, "" if hindrance else self.backend.device_id(device)])

    def obstacle(self, place: str, device: torch.device) -> str:
        """Return why there can be no group: another host, one device for both, or one end can be in none."""
        host, hindrance, device_id = (*place.split("|"), "", "")[:3]
        if reason := elsewhere(host):
            return reason
        if hindrance:
            return f"it {hindrance}"
        if hindrance := self._hindrance(device):
            return f"the sender {hindrance}"
        if device_id and device_id == self.backend.device_id(device):
            return "it is on the sender's own device, and a group takes each device once"
        return ""

    def receiver(self, manifest: Manifest, device: torch.device) -> WeightReceiver:
        """Return an end that joins the sender's group."""
        return _CollectiveReceiver(self._membership(device), self._plan(manifest), device)

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
    ) -> WeightSender:
        """Return an end that makes a group with all receivers."""
        return _CollectiveSender(
            self._membership(device), self._plan(manifest), weights, len(receivers), device
        )

    def _hindrance(self, device: torch.device) -> str:
        """Return why this process can be in no group with ``device``; empty if it can."""
        backend = self.backend
        if device.type != backend.device_type:
            return f"has its tensors on {device.type}; groups of backend {backend.name!r} take {backend.device_type}"
        if _uses_torchs_groups() and not backend.capabilities().concurrent_collectives:
            return f"uses torch's own groups; backend {backend.name!r} takes collectives from one thread at a time"
        return ""

    def _membership(self, device: torch.device) -> _Membership:
        return _Membership(self.backend, device, self._streams)

    def _plan(self, manifest: Manifest) -> BucketPlan:
        return BucketPlan.of(manifest, self.config.bucket_bytes)


class _OwnStream:
    """A stream of one update: no other work of the device waits for its peers, or fails with them."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._module: Any = torch.get_device_module(device)
        on_host = torch.empty(0, device=device).is_cpu
        self._stream: Any = None if on_host else self._module.Stream(device)

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Queue work here, after what the thread's own stream has to do now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._stream):
            yield

    def finish(self) -> None:
        """Return when all that was queued is done. Raise PeerLost where something has failed."""
        if self._stream is not None:
            try:
                self._stream.synchronize()
            except RuntimeError as error:  # torch's, for all that fails on a device
                raise PeerLost(f"a broadcast has failed on {self.device}: {error}") from error


class _Membership:
    """One end's part in the group of one update; any thread may end it."""

    def __init__(self, backend: Backend, device: torch.device, streams: list[_OwnStream]) -> None:
        self._backend, self._device, self._streams = backend, device, streams
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
    def group(self, rendezvous: Rendezvous, deadline: float) -> Generator[tuple[ProcessGroup, _OwnStream]]:
        """Yield the group of all who join, and a stream for its calls.

        It ends at the deadline; all members leave it together.
        """
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.close)
        timer.start()
        try:
            rendezvous.join()
            stream = self._own_stream()
            with stream.entered():
                group = self._backend.process_group(rendezvous, self._device)
            self._end_with(group.abort)
            yield group, stream
            stream.finish()
            rendezvous.barrier()  # a group ends for all when one leaves it
            self._streams.append(stream)
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

    def _own_stream(self) -> _OwnStream:
        """Return a stream on which nothing has failed."""
        for stream in list(self._streams):
            if stream.device == self._device:
                with contextlib.suppress(ValueError):  # another update was faster
                    self._streams.remove(stream)
                    return stream
        return _OwnStream(self._device)

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
        with self._membership.group(rendezvous, deadline) as (group, stream):
            yield from self._plan.unpack(self._buckets(group, stream))

    def close(self) -> None:
        self._membership.close()

    def _buckets(self, group: ProcessGroup, stream: _OwnStream) -> Generator[Tensor]:
        """Yield buckets that have arrived, so that the stream of whoever reads them never waits for a peer."""
        import torch

        memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8, device=self._device)
        for pieces in self._plan.pieces:
            bucket = memory[: bucket_size(pieces)]
            with stream.entered():
                group.broadcast(bucket, src=0)
            stream.finish()
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
        with self._membership.group(self._rendezvous, deadline) as (group, stream), stream.entered():
            memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8, device=self._device)
            for bucket in self._plan.pack(self._weights, memory):
                group.broadcast(bucket, src=0)

    def close(self) -> None:
        self._membership.close()


def _uses_torchs_groups() -> bool:
    """Return whether other threads may make collective calls by torch; in a group of one FSDP and vLLM make none."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
