"""Process groups that outlive an update: the next one between the same ends goes on with them.

A group is kept by an end that came through the whole update, and closed by one that did not; only where all ends have
kept it does the sender go on with it. So nobody joins a call that another one has left half done.
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
    """Between whom a group is kept."""

    update_group: str
    replica: str
    """Empty at a receiver's end: a rank belongs to one replica."""
    device: torch.device


class WeightGroup:
    """A group of a sender and its ranks, and a stream for its calls.

    No other work of the device waits for its peers, or fails with them. Any thread may close it.
    """

    def __init__(self, name: str, backend: Backend, rendezvous: TcpRendezvous, device: torch.device) -> None:
        """Build it with all other members of ``rendezvous``, which gives its calls their timeout."""
        import torch

        self.name, self.timeout_s = name, rendezvous.timeout_s
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._device = device
        self._module: Any = torch.get_device_module(device)
        on_host = torch.empty(0, device=device).is_cpu
        self._own_stream = None if on_host else OwnStream(device)
        self._is_drained = True
        """Whether all that was ever queued is done, and has not failed."""
        with self.stream():
            self._group = backend.process_group(rendezvous, device)

    def seat(self, rank: int) -> str:
        """Return the name of a rank's place in the group."""
        return f"{self.name}/{rank}"

    @contextlib.contextmanager
    def stream(self) -> Generator[None]:
        """Queue work on the group's stream, after what the thread's own stream has to do now."""
        if self._own_stream is None:
            yield
            return
        stream = self._own_stream.stream
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            yield

    def broadcast(self, bucket: Tensor) -> None:
        """Fill the tensor on every rank with that of the sender; called on the group's stream."""
        self._is_drained = False
        self._group.broadcast(bucket, src=0)

    def finish(self) -> None:
        """Return when all that was queued is done. Raise PeerLost where something has failed."""
        if self._own_stream is not None:
            try:
                self._own_stream.stream.synchronize()
            except RuntimeError as error:  # torch's, for all that fails on a device
                raise PeerLost(f"a broadcast has failed on {self._device}: {error}") from error
        self._is_drained = True

    def close(self) -> None:
        """End it: who waits in it gets PeerLost. A stream on which something may have failed is used no more."""
        self._group.abort()
        if self._own_stream is not None and self._is_drained:
            self._own_stream.close()


class KeptGroups:
    """The groups that wait for the next update; one that is in use is not here."""

    def __init__(self) -> None:
        """Keep none yet."""
        self._lock = threading.Lock()
        self._idle: dict[Route, WeightGroup] = {}

    def take(self, route: Route) -> WeightGroup | None:
        """Return what was kept for ``route``, for its one user."""
        with self._lock:
            return self._idle.pop(route, None)

    def keep(self, route: Route, group: WeightGroup) -> None:
        """Keep a group for ``route``, instead of the one before."""
        with self._lock:
            before, self._idle[route] = self._idle.get(route), group
        if before is not None:
            before.close()

    def forget(self, replica: str) -> None:
        """Close those towards a replica."""
        with self._lock:
            routes = [route for route in self._idle if route.replica == replica]
            idle = [self._idle.pop(route) for route in routes]
        for group in idle:
            group.close()

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for group in idle.values():
            group.close()


class Membership:
    """One end's part in the group of one update; any thread may close it."""

    def __init__(self, kept: KeptGroups, route: Route, backend: Backend) -> None:
        """Begin with the group that the update before has left for ``route``, where there is one."""
        self._kept, self._route, self._backend = kept, route, backend
        self._lock = threading.Lock()
        self._closed = False
        self._group = kept.take(route)
        self._rendezvous: TcpRendezvous | None = None
        self._name = ""

    @property
    def seat(self) -> str:
        """This end's place in the group of the update before; empty where it has none."""
        return "" if self._group is None else self._group.seat(self._group.rank)

    def goes_on_with(self, seats: Sequence[str], deadline: float) -> bool:
        """Return whether the group of the update before is that of the other ends, too.

        One whose calls would give up before half of the time is over is made anew.
        """
        group = self._group
        if group is None or 2 * group.timeout_s < deadline - time.monotonic():
            return False
        return list(seats) == [group.seat(rank) for rank in range(1, group.world_size)]

    def meet(
        self, address: str, rank: int, world_size: int, token: str, name: str, deadline: float
    ) -> TcpRendezvous:
        """Return this end's rendezvous for a new group, which nobody has joined yet."""
        left_s = max(1e-3, deadline - time.monotonic())
        rendezvous = TcpRendezvous(address, rank, world_size, token, left_s)
        self._name = name
        self._hold(None, rendezvous)
        return rendezvous

    @contextlib.contextmanager
    def group(self, deadline: float) -> Generator[WeightGroup]:
        """Yield the group of all ends. It is kept after the block, and closed where that fails or is late."""
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
        """End the update here; who waits in its group gets PeerLost."""
        with self._lock:
            self._closed = True
            held = self._group, self._rendezvous
            self._group = self._rendezvous = None
        for resource in held:
            if resource is not None:
                resource.close()

    def _joined(self) -> WeightGroup:
        """Return the group that goes on, or the new one once all have joined it."""
        rendezvous = self._rendezvous
        if rendezvous is not None:
            rendezvous.join()
            self._hold(WeightGroup(self._name, self._backend, rendezvous, self._route.device), rendezvous)
        group = self._group
        if group is None:
            raise PeerLost("this end of the update was closed, or has no group to go on with")
        return group

    def _hold(self, group: WeightGroup | None, rendezvous: TcpRendezvous) -> None:
        """Have ``close`` end these instead of the group of the update before, also where it came first."""
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
        """Keep a group with which an update came through here, unless this end was closed."""
        with self._lock:
            if self._closed:
                raise PeerLost("this end of the update was closed")
            self._group = None
        self._kept.keep(self._route, group)
