"""IpcWeightTransport: through memory that both processes map, by the backend's own transport of one host.

That is the memory of the device where both are on one and the vendor lets processes share it, else the host's. What
carries the features of a colocated run carries buckets of weights the other way: a bucket is a sample of bytes.
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
"""Bytes of a "token" of a bucket; its id takes 8 more."""
_SLICE_S = 0.25
"""Longest time in one call of the backend's transport: then ``close`` is looked for."""
_CONNECT_S = 10.0
"""The same for a connection, which is made anew then: a rank that is only slow must have time to take it."""
_SCHEMA = FeatureSchema(layers=(0,), hidden_size=_ROW_BYTES, dtype="uint8")


class IpcWeightTransport(WeightTransport):
    """The weight transport ``ipc``."""

    name: ClassVar[str] = "ipc"
    api_version: ClassVar[int] = 2

    def place(self, device: torch.device) -> str:
        """Return this host, this process, and the device's own name if any."""
        return f"{host_name()}|{os.getpid()}|{device_name(self.backend, device)}"

    def obstacle(self, place: str, device: torch.device) -> str:
        """Return that a rank is on another host, where it is."""
        return elsewhere(place.partition("|")[0])

    def medium(self, place: str, device: torch.device) -> WeightMedium:
        """Return the memory of the device that both are on, else the host's; the last choice within one process.

        Vendors differ in whether a process can map what it shares itself.
        """
        _, process, device_id = place.split("|", 2)
        if process == str(os.getpid()):
            return WeightMedium.UNSTATED
        shared = device_id and device_id == device_name(self.backend, device)
        return WeightMedium.DEVICE_MEMORY if shared else WeightMedium.HOST_MEMORY

    def receiver(self, manifest: Manifest, device: torch.device, bucket_bytes: int) -> WeightReceiver:
        """Return an end that takes buckets as they come."""
        return _IpcReceiver(self.backend.transport("colocated"), BucketPlan.of(manifest, bucket_bytes))

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
        replica: str,
    ) -> WeightSender:
        """Return an end that writes each bucket into the memory of each receiver."""
        transport, plan = (
            self.backend.transport("colocated"),
            BucketPlan.of(manifest, self.config.bucket_bytes),
        )
        return _IpcSender(transport, plan, weights, receivers, device)


class _Closable:
    """Resources that one thread uses and another may close."""

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
        """Return what ``action(timeout_s)`` returns, called until it does before its time is over."""
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
        self._transport, self._plan, self._weights = transport, plan, weights
        self._receivers, self._device = receivers, device
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
        """Return when the sample's memory may be written anew."""
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
    """Return the rows of a bucket; one at least, since a sample has a token."""
    return max(1, -(-size // _ROW_BYTES))
