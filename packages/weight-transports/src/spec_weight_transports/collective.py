"""CollectiveTransport broadcasts buckets to all ranks of a replica in a process group."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, ClassVar

from spec_core import WeightMedium, WeightReceiver, WeightSender, WeightTransport
from spec_core.errors import ProtocolError
from spec_kit.weight_sync import BucketPlan, bucket_size
from spec_weight_transports.cached_groups import CachedGroups, Membership, Route
from spec_weight_transports.host import device_name, elsewhere, host_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from spec_core import Backend, Manifest, WeightTransportConfig
    from spec_weight_transports.cached_groups import WeightGroup

_LOOPBACK = "127.0.0.1:0"
"""Address of the rendezvous: all members of the process group are on this host (R7)."""


class CollectiveTransport(WeightTransport):
    """The weight transport ``collective``: publisher and ranks of a replica reuse a process group (W7)."""

    name: ClassVar[str] = "collective"
    api_version: ClassVar[int] = 1

    def __init__(self, config: WeightTransportConfig, backend: Backend) -> None:
        """Store the options; the first update builds a process group."""
        super().__init__(config, backend)
        self._cached = CachedGroups()

    def location(self, device: torch.device) -> str:
        """Return host, backend, its group settings, obstacle and device id, joined by ``|``.

        The obstacle says why this process can join no group; it is empty if there is none. The device id is
        the vendor's name of the device; it is empty if processes cannot compare ids.
        """
        backend = self.backend
        groups = [backend.name, backend.group_settings(), self._hindrance(device)]
        return "|".join([host_name(), *groups, device_name(backend, device)])

    def obstacle(self, location: str, device: torch.device) -> str:
        """Return why there can be no group with the rank, such as another host or backend; empty if there can."""
        host, backend_name, settings, hindrance, device_id = (*location.split("|"), "", "", "", "")[:5]
        if reason := elsewhere(host):
            return reason
        if backend_name != self.backend.name:
            return f"its groups are those of backend {backend_name!r}, the sender's of {self.backend.name!r}"
        if settings != (own := self.backend.group_settings()):
            theirs = settings or "no settings"
            return f"its process has {theirs} and the sender's {own or 'none'}; start both with the same"
        if hindrance:
            return f"it {hindrance}"
        if hindrance := self._hindrance(device):
            return f"the sender {hindrance}"
        if device_id and device_id == self.backend.device_id(device):
            return "it is on the sender's own device, and a group takes each device once"
        return ""

    def medium(self, location: str, device: torch.device) -> WeightMedium:
        """Return the medium of the backend's collectives; on the CPU, sockets."""
        import torch

        is_cpu = torch.empty(0, device=device).is_cpu
        return WeightMedium.SOCKETS if is_cpu else WeightMedium.DEVICE_LINK

    def receiver(self, manifest: Manifest, device: torch.device, bucket_bytes: int) -> WeightReceiver:
        """Return a receiver that joins the sender's process group."""
        membership = self._membership(Route(manifest.group, "", device))
        return _CollectiveReceiver(membership, BucketPlan.of(manifest, bucket_bytes), device)

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
        replica: str,
    ) -> WeightSender:
        """Return a sender that is in one process group with all receivers."""
        membership = self._membership(Route(manifest.group, replica, device))
        plan = BucketPlan.of(manifest, self.config.bucket_bytes)
        return _CollectiveSender(membership, plan, weights, receivers, device)

    def forget(self, replica: str) -> None:
        """Close the groups with the ranks of a replica."""
        self._cached.forget(replica)

    def close(self) -> None:
        """Close the groups that are cached."""
        self._cached.close()

    def _hindrance(self, device: torch.device) -> str:
        """Return why this process cannot join a group with ``device``; empty if it can."""
        backend = self.backend
        if device.type != backend.device_type:
            return f"has its tensors on {device.type}; groups of backend {backend.name!r} take {backend.device_type}"
        if _uses_torchs_groups() and not backend.capabilities().concurrent_collectives:
            return f"uses torch's own groups; backend {backend.name!r} takes collectives from one thread at a time"
        return ""

    def _membership(self, route: Route) -> Membership:
        return Membership(self._cached, route, self.backend)


class _CollectiveReceiver(WeightReceiver):
    """A receiving rank of the group; its number is 1 or higher.

    ``address`` names the group of the previous update and the rank in it.
    """

    def __init__(self, membership: Membership, plan: BucketPlan, device: torch.device) -> None:
        self._membership = membership
        self._plan = plan
        self._device = device
        self.address = membership.member_name

    def receive(self, sender: str, deadline: float) -> Iterator[tuple[str, Tensor]]:
        if sender:
            self._membership.new_rendezvous(*json.loads(sender), deadline=deadline)
        with self._membership.group(deadline) as group:
            yield from self._plan.unpack(self._buckets(group))

    def close(self) -> None:
        self._membership.close()

    def _buckets(self, group: WeightGroup) -> Generator[Tensor]:
        """Yield buckets that have arrived completely, so that the caller's stream never waits for a peer."""
        import torch

        memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8, device=self._device)
        for pieces in self._plan.pieces:
            bucket = memory[: bucket_size(pieces)]
            with group.stream():
                group.broadcast(bucket)
            group.finish()
            yield bucket


class _CollectiveSender(WeightSender):
    """Rank 0 of the group.

    It sends each rank the address of a new group, or an empty string if all reuse the previous group.
    """

    def __init__(
        self,
        membership: Membership,
        plan: BucketPlan,
        weights: Mapping[str, Tensor],
        member_names: Sequence[str],
        device: torch.device,
    ) -> None:
        self._membership = membership
        self._plan = plan
        self._weights = weights
        self._device = device
        self._member_names = member_names
        self._is_open = False

    def open(self, deadline: float) -> Sequence[str]:
        self._is_open = True
        if self._membership.can_reuse(self._member_names, deadline):
            return [""] * len(self._member_names)
        world_size = 1 + len(self._member_names)
        token = secrets.token_hex(16)
        name = secrets.token_hex(8)
        address = self._membership.new_rendezvous(_LOOPBACK, 0, world_size, token, name, deadline).address
        return [json.dumps([address, rank, world_size, token, name]) for rank in range(1, world_size)]

    def send(self, deadline: float) -> None:
        import torch

        if not self._is_open:
            raise ProtocolError("open the sender first")
        with self._membership.group(deadline) as group, group.stream():
            memory = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8, device=self._device)
            for bucket in self._plan.pack(self._weights, memory):
                group.broadcast(bucket)

    def close(self) -> None:
        self._membership.close()


def _uses_torchs_groups() -> bool:
    """Return whether other threads may call torch's collectives.

    FSDP and vLLM call none in a group of one process.
    """
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
