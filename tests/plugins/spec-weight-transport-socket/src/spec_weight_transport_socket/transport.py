"""SocketTransport: each rank connects to whoever pushes, and reads the tensors' bytes from there."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from spec_core import WeightMedium, WeightReceiver, WeightSender, WeightTransport, WeightTransportConfig
from spec_core.errors import DeadlineExceeded, PeerLost
from spec_core.records import Availability
from spec_kit.weight_sync import BucketPlan, bucket_size
from spec_weight_transport_socket.sockets import Sockets

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from spec_core import Manifest

SHOW_S = 1.0
"""Longest time for what has connected to show the secret."""


class SocketConfig(WeightTransportConfig):
    """Keys ``push.options.socket``: ``push.options.socket.host=10.0.0.1`` works on the command line."""

    host: str = "127.0.0.1"
    """Address of this host at which whoever pushes listens for the ranks of servers."""


class SocketTransport(WeightTransport):
    """The weight transport ``socket``."""

    name: ClassVar[str] = "socket"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[WeightTransportConfig]] = SocketConfig

    @classmethod
    def probe(cls) -> Availability:
        """W6: sockets are everywhere."""
        return Availability(ok=True)

    def location(self, device: torch.device) -> str:
        """W6: this host, by a name that is new with each start of its kernel."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def obstacle(self, location: str, device: torch.device) -> str:
        """W6: a loopback address leads nowhere from another host."""
        host = cast("SocketConfig", self.config).host
        if location != self.location(device) and ipaddress.ip_address(host).is_loopback:
            return f"it is on another host, which cannot reach {host}; set push.options.socket.host"
        return ""

    def medium(self, location: str, device: torch.device) -> WeightMedium:
        """W6: without ``push.transport`` the fastest medium is taken."""
        return WeightMedium.SOCKETS

    def receiver(self, manifest: Manifest, device: torch.device, bucket_bytes: int) -> WeightReceiver:
        return SocketReceiver(BucketPlan.of(manifest, bucket_bytes))

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
        replica: str,
    ) -> WeightSender:
        config = cast("SocketConfig", self.config)
        return SocketSender(
            config.host, BucketPlan.of(manifest, config.bucket_bytes), weights, len(receivers)
        )


class SocketReceiver(WeightReceiver):
    """A rank's end; its tensors are on the CPU."""

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._sockets = Sockets()

    def receive(self, sender: str, deadline: float) -> Iterator[tuple[str, Tensor]]:
        """W1: the tensors are views of one bucket, which is read anew when the next is asked for."""
        host, port, secret = sender.split(" ")
        end = self._sockets.connect(host, int(port), deadline)
        self._sockets.write(end, secret.encode(), deadline)
        return self._plan.unpack(self._buckets(end, deadline))

    def close(self) -> None:
        self._sockets.close()

    def _buckets(self, end: socket.socket, deadline: float) -> Iterator[Tensor]:
        import torch

        memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8)
        for pieces in self._plan.pieces:
            bucket = memory[: bucket_size(pieces)]
            self._sockets.read(end, memoryview(bucket.numpy()), deadline)
            yield bucket


class SocketSender(WeightSender):
    """The end of whoever pushes."""

    def __init__(self, host: str, plan: BucketPlan, weights: Mapping[str, Tensor], num_ranks: int) -> None:
        self._host, self._plan, self._weights, self._num_ranks = host, plan, weights, num_ranks
        self._sockets = Sockets()
        self._secret = secrets.token_hex(16)

    def open(self, deadline: float) -> Sequence[str]:
        """W3: listen, and say where; nobody has connected yet."""
        self._listener = self._sockets.listen(self._host)
        port = self._listener.getsockname()[1]
        return [f"{self._host} {port} {self._secret}"] * self._num_ranks

    def send(self, deadline: float) -> None:
        """W2: one bucket after the other to every rank."""
        import torch

        memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8)
        ranks = [self._next_rank(deadline) for _ in range(self._num_ranks)]
        for bucket in self._plan.pack(self._weights, memory):
            for rank in ranks:
                self._sockets.write(rank, memoryview(bucket.numpy()), deadline)

    def close(self) -> None:
        self._sockets.close()

    def _next_rank(self, deadline: float) -> socket.socket:
        """Return the next connection that shows the secret; any process can connect to a port."""
        while True:
            end = self._sockets.accept(self._listener, deadline)
            shown = bytearray(len(self._secret))
            with suppress(DeadlineExceeded, PeerLost):
                self._sockets.read(end, memoryview(shown), min(deadline, time.monotonic() + SHOW_S))
            if hmac.compare_digest(shown, self._secret.encode()):
                return end
