"""IpcWeightTransport sends weights through memory that both processes map.

The memory is device memory if both processes use the same device and the vendor lets processes share memory,
else host memory. The backend's feature transport for colocated runs sends each bucket as a feature sample of
bytes.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, ClassVar, TypeVar

from spec_core import WeightMedium, WeightReceiver, WeightSender, WeightTransport
from spec_core.errors import DeadlineExceeded, PeerLost
from spec_core.records import FeatureSample, FeatureSchema
from spec_kit.weight_sync import BucketPlan, bucket_size
from spec_weight_transports.host import device_name, elsewhere, host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import torch
    from torch import Tensor

    from spec_core import FeatureReceiver, FeatureSender, Manifest, Transport

R = TypeVar("R")

_ROW_BYTES = 4096
"""Bytes of a row ("token") of a bucket, without the 8 bytes of the token's id."""
_SLICE_S = 0.25
"""Longest time, in seconds, of one call of the backend's transport; between calls ``close`` is checked."""
_CONNECT_S = 10.0
"""Longest time, in seconds, of one attempt to connect; long enough for a slow rank to accept."""
_SCHEMA = FeatureSchema(layers=(0,), hidden_size=_ROW_BYTES, dtype="uint8")


class IpcWeightTransport(WeightTransport):
    """The weight transport ``ipc``: shared memory between processes of one host."""

    name: ClassVar[str] = "ipc"
    api_version: ClassVar[int] = 1

    def location(self, device: torch.device) -> str:
        """Return this host's name, this process's id, and the vendor's id of the device, if any."""
        return f"{host_name()}|{os.getpid()}|{device_name(self.backend, device)}"

    def obstacle(self, location: str, device: torch.device) -> str:
        """Return an error message if the rank is on another host; empty if it is on this host."""
        return elsewhere(location.partition("|")[0])

    def medium(self, location: str, device: torch.device) -> WeightMedium:
        """Return DEVICE_MEMORY if both processes use one device, else HOST_MEMORY.

        Return UNSTATED within one process. On some hardware a process cannot map memory that it has shared itself.
        """
        _, process, device_id = location.split("|", 2)
        if process == str(os.getpid()):
            return WeightMedium.UNSTATED
        shared = device_id and device_id == device_name(self.backend, device)
        return WeightMedium.DEVICE_MEMORY if shared else WeightMedium.HOST_MEMORY

    def receiver(self, manifest: Manifest, device: torch.device, bucket_bytes: int) -> WeightReceiver:
        """Return a receiver that receives buckets in the order in which they are sent."""
        return _IpcReceiver(self.backend.transport("colocated"), BucketPlan.of(manifest, bucket_bytes))

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
        replica: str,
    ) -> WeightSender:
        """Return a sender that writes each bucket into the shared memory of each receiver."""
        transport = self.backend.transport("colocated")
        plan = BucketPlan.of(manifest, self.config.bucket_bytes)
        return _IpcSender(transport, plan, weights, receivers, device)


class _Closable:
    """Holds transport resources that one thread uses and another thread may close."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._resources: list[FeatureReceiver | FeatureSender] = []
        self._closed = False

    def keep(self, resource: FeatureReceiver | FeatureSender) -> None:
        with self._lock:
            self._resources.append(resource)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            for resource in self._resources:
                resource.close()

    def call(self, action: Callable[[float], R], deadline: float, slice_s: float = _SLICE_S) -> R:
        """Call ``action(timeout_s)`` repeatedly until it returns instead of timing out, and return its result."""
        while True:
            with self._lock:
                if self._closed:
                    raise PeerLost("this end of the update was closed")
                left_s = deadline - time.monotonic()
                try:
                    return action(max(0.0, min(slice_s, left_s)))
                except DeadlineExceeded:
                    if left_s <= slice_s:
                        raise


class _IpcReceiver(WeightReceiver):
    def __init__(self, transport: Transport, plan: BucketPlan) -> None:
        self._plan = plan
        # While one bucket is loaded, the next is written.
        self._receiver = transport.listen(_SCHEMA, 2 * _num_rows(plan.bucket_bytes) * (_ROW_BYTES + 8))
        self._guard = _Closable()
        self._guard.keep(self._receiver)
        self.address = self._receiver.address

    def receive(self, sender: str, deadline: float) -> Iterator[tuple[str, Tensor]]:
        return self._plan.unpack(self._buckets(deadline))

    def close(self) -> None:
        self._guard.close()

    def _buckets(self, deadline: float) -> Generator[Tensor]:
        for pieces in self._plan.pieces:
            sample = self._guard.call(self._receiver.receive, deadline)
            yield sample.hidden_TNH.view(-1)[: bucket_size(pieces)]
            self._release(sample, deadline)

    def _release(self, sample: FeatureSample, deadline: float) -> None:
        self._guard.call(lambda _: self._receiver.release(sample), deadline)


class _IpcSender(WeightSender):
    def __init__(
        self,
        transport: Transport,
        plan: BucketPlan,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._weights = weights
        self._receivers = receivers
        self._device = device
        self._guard = _Closable()

    def open(self, deadline: float) -> Sequence[str]:
        return [""] * len(self._receivers)

    def send(self, deadline: float) -> None:
        import torch

        senders = [self._connect(address, deadline) for address in self._receivers]
        size = _num_rows(self._plan.bucket_bytes) * _ROW_BYTES
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        for number, bucket in enumerate(self._plan.pack(self._weights, memory)):
            self._send_all(senders, _sample(number, memory[: _num_rows(len(bucket)) * _ROW_BYTES]), deadline)

    def _send_all(self, senders: Sequence[FeatureSender], sample: FeatureSample, deadline: float) -> None:
        """Send a sample to all receivers, and wait until its memory may be overwritten."""
        tickets = [
            self._guard.call(lambda left_s, sender=sender: sender.send(sample, left_s), deadline)
            for sender in senders
        ]
        for ticket in tickets:
            self._guard.call(lambda left_s, ticket=ticket: _done(ticket, left_s), deadline)

    def close(self) -> None:
        self._guard.close()

    def _connect(self, address: str, deadline: float) -> FeatureSender:
        def connect(timeout_s: float) -> FeatureSender:
            return self._transport.connect(address, _SCHEMA, max(1e-3, timeout_s))

        sender = self._guard.call(connect, deadline, _CONNECT_S)
        self._guard.keep(sender)
        return sender


def _done(ticket: Future[None], timeout_s: float) -> None:
    try:
        ticket.result(timeout_s)
    except FutureTimeoutError as error:
        raise DeadlineExceeded("a rank does not read") from error


def _sample(number: int, memory: Tensor) -> FeatureSample:
    import torch

    rows = memory.view(-1, 1, _ROW_BYTES)
    ids = torch.zeros(len(rows), dtype=torch.int64, device=memory.device)
    return FeatureSample(request_id=number, input_ids=ids, hidden_TNH=rows)


def _num_rows(size: int) -> int:
    """Return the number of rows of a bucket of ``size`` bytes.

    A feature sample needs at least one row (token).
    """
    return max(1, -(-size // _ROW_BYTES))
