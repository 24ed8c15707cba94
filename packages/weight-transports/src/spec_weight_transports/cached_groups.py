"""Cache process groups after an update, for the next update between the same processes.

A process caches the group if its part of the update succeeded, and closes it otherwise. The sender reuses the
group only if all members have cached it. So no member joins a collective that another member has left half
done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_kit import OwnStream
from spec_processes.sockets import TcpRendezvous

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch
    from torch import Tensor

    from spec_core import Backend


class Route(NamedTuple):
    """Key of a cached group: the update group, the replica and the device."""

    update_group: str
    replica: str
    """Name of the replica; empty in a receiver, because a rank belongs to one replica."""
    device: torch.device


class WeightGroup:
    """A process group of a sender and its receiving ranks, with a device stream for its collectives.

    Other work on the device does not wait for peers, or fail with them. Any thread may close the group.
    """

    def __init__(self, name: str, backend: Backend, rendezvous: TcpRendezvous, device: torch.device) -> None:
        """Build the group with all members of ``rendezvous``, whose timeout applies to the group's calls."""
        import torch

        self.name = name
        self.timeout_s = rendezvous.timeout_s
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._device = device
        self._module: Any = torch.get_device_module(device)
        on_host = torch.empty(0, device=device).is_cpu
        self._own_stream = None if on_host else OwnStream(device)
        self._is_drained = True
        """Whether all queued work has finished without an error."""
        with self.stream():
            self._group = backend.process_group(rendezvous, device)

    def member_name(self, rank: int) -> str:
        """Return a text that names this group and the rank in it."""
        return f"{self.name}/{rank}"

    @contextlib.contextmanager
    def stream(self) -> Generator[None]:
        """Queue the block's work on the group's stream, after the work queued so far on the current stream."""
        if self._own_stream is None:
            yield
            return
        stream = self._own_stream.stream
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            yield

    def broadcast(self, bucket: Tensor) -> None:
        """Copy the sender's tensor into the tensor of every rank; call it inside ``with self.stream()``."""
        self._is_drained = False
        self._group.broadcast(bucket, src=0)

    def finish(self) -> None:
        """Wait until all queued work is done. Raise PeerLost if any of it failed."""
        if self._own_stream is not None:
            try:
                self._own_stream.stream.synchronize()
            except RuntimeError as error:  # torch raises it for all errors of a device
                raise PeerLost(f"a broadcast has failed on {self._device}: {error}") from error
        self._is_drained = True

    def close(self) -> None:
        """Close the group: calls that wait in it raise PeerLost.

        A stream on which work may have failed is not reused.
        """
        self._group.abort()
        if self._own_stream is not None and self._is_drained:
            self._own_stream.close()


class CachedGroups:
    """The cached groups that no update uses at present."""

    def __init__(self) -> None:
        """Begin without groups."""
        self._lock = threading.Lock()
        self._idle: dict[Route, WeightGroup] = {}

    def take(self, route: Route) -> WeightGroup | None:
        """Remove the group that is cached for ``route`` and return it; None if there is none."""
        with self._lock:
            return self._idle.pop(route, None)

    def put(self, route: Route, group: WeightGroup) -> None:
        """Cache a group for ``route``, in place of the previous group."""
        with self._lock:
            before = self._idle.get(route)
            self._idle[route] = group
        if before is not None:
            before.close()

    def forget(self, replica: str) -> None:
        """Close the cached groups of a replica."""
        with self._lock:
            routes = [route for route in self._idle if route.replica == replica]
            idle = [self._idle.pop(route) for route in routes]
        for group in idle:
            group.close()

    def close(self) -> None:
        """Close all cached groups."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for group in idle.values():
            group.close()


class Membership:
    """One process's membership in the group of one update; any thread may close it."""

    def __init__(self, cached: CachedGroups, route: Route, backend: Backend) -> None:
        """Take the group that the previous update has cached for ``route``, if there is one."""
        self._cached = cached
        self._route = route
        self._backend = backend
        self._lock = threading.Lock()
        self._closed = False
        self._group = cached.take(route)
        self._rendezvous: TcpRendezvous | None = None
        self._name = ""

    @property
    def member_name(self) -> str:
        """Name of the cached group and of this process's rank in it; empty if no group is cached."""
        return "" if self._group is None else self._group.member_name(self._group.rank)

    def can_reuse(self, member_names: Sequence[str], deadline: float) -> bool:
        """Return whether all other members have cached the same group, so that it is reused.

        A group whose timeout is shorter than half of the time until ``deadline`` is not reused.
        """
        group = self._group
        if group is None or 2 * group.timeout_s < deadline - time.monotonic():
            return False
        return list(member_names) == [group.member_name(rank) for rank in range(1, group.world_size)]

    def new_rendezvous(
        self, address: str, rank: int, world_size: int, token: str, name: str, deadline: float
    ) -> TcpRendezvous:
        """Return this process's rendezvous for a new group, before the process has joined."""
        left_s = max(1e-3, deadline - time.monotonic())
        rendezvous = TcpRendezvous(address, rank, world_size, token, left_s)
        self._name = name
        self._hold(None, rendezvous)
        return rendezvous

    @contextlib.contextmanager
    def group(self, deadline: float) -> Generator[WeightGroup]:
        """Join the update's group if it is new, and yield it.

        After the block the group is cached. It is closed if the block fails or ends after ``deadline``.
        """
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.close)
        timer.start()
        try:
            group = self._joined()
            yield group
            group.finish()
            self._leave(group)
        except RunError as error:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the update was not over at its deadline") from error
            raise
        finally:
            timer.cancel()
            self.close()

    def close(self) -> None:
        """End the update in this process; calls that wait in its group raise PeerLost."""
        with self._lock:
            self._closed = True
            held = self._group, self._rendezvous
            self._group = self._rendezvous = None
        for resource in held:
            if resource is not None:
                resource.close()

    def _joined(self) -> WeightGroup:
        """Return the reused group, or the new group after all members have joined it."""
        rendezvous = self._rendezvous
        if rendezvous is not None:
            rendezvous.join()
            self._hold(WeightGroup(self._name, self._backend, rendezvous, self._route.device), rendezvous)
        group = self._group
        if group is None:
            raise PeerLost("this end of the update was closed, or has no group to go on with")
        return group

    def _hold(self, group: WeightGroup | None, rendezvous: TcpRendezvous) -> None:
        """Let ``close`` end ``group`` and ``rendezvous``. If it was called before, end them and raise PeerLost."""
        with self._lock:
            before, self._group = self._group, group
            self._rendezvous = rendezvous
            was_closed = self._closed
        if before is not None:
            before.close()
        if was_closed:
            self.close()
            raise PeerLost("this end of the update was closed")

    def _leave(self, group: WeightGroup) -> None:
        """Cache a group after a successful update, unless this membership was closed."""
        with self._lock:
            if self._closed:
                raise PeerLost("this end of the update was closed")
            self._group = None
        self._cached.put(self._route, group)
