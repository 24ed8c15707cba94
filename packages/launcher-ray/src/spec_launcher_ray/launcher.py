"""RayLauncher starts each worker of a run by an actor in a Ray cluster.

Ray reserves the devices, starts an actor for each worker on the right host, and ends the actors with the run.
Messages do not pass through Ray: each worker has a control channel to this process, as with ``local``.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core import LOOPBACK, Launcher, WorkerEnded
from spec_core.errors import ConfigError, HostLost, NoDevices, RunError, SpecError
from spec_core.records import Availability
from spec_launcher_ray.config import RayConfig
from spec_launcher_ray.outcomes import UNKILLABLE_S, ending_of
from spec_launcher_ray.placement import DeviceTable, place
from spec_processes import ChannelListener, ChannelWorker, ControlChannel, WorkerInbox

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from spec_core import LaunchContext, LauncherConfig, WorkerHandle, WorkerMessage, WorkerSpec
    from spec_launcher_ray.cluster import Cluster, Reservation
    from spec_launcher_ray.placement import Bundle, Host
    from spec_launcher_ray.prepared_hosts import PreparedHosts

log = logging.getLogger(__name__)

_START_S = 120.0
"""Longest wait, in seconds, for Ray to start the actors and for their workers to connect."""
_MOVE_S = 20.0
"""Longest wait, in seconds, for the devices of a worker that is moved; they were free a moment before."""
_LOOK_S = 0.2
"""Seconds between two checks of the actors while workers start."""
_HOSTS_LOOK_S = 2.0
"""Seconds between two checks of the hosts while workers start: Ray does not report that a host is lost."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The specification and devices of a worker, from which it is started, and started again."""

    spec: WorkerSpec
    env: Mapping[str, str]
    options: Mapping[str, Any]
    """Ray options of the worker's actor."""
    host: Host
    address: str


@dataclass(eq=False, kw_only=True)
class RayWorker(ChannelWorker):
    """A worker, and the reference to the return code of its actor."""

    code: Any
    host: Host
    cluster: Cluster
    alone: bool
    """Whether all workers of the run are on this worker's host."""
    log: Path

    def ending(self) -> WorkerEnded:
        """Return how the worker, its actor, or the Ray node of its host has ended."""
        how, killed = ending_of(self.code) if self.cluster.lives(self.host) else ("", True)
        if lost := not self.cluster.lives(self.host):  # asked again: a dying host may have answered
            how = f"was lost: {_gone(self.host)}"
            killed = True
        return WorkerEnded(self, f"{how}; see {self.log}", killed, host_lost=lost and self.alone)


class RayLauncher(Launcher):
    """Starts each worker in an actor that holds its devices."""

    name: ClassVar[str] = "ray"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[LauncherConfig]] = RayConfig

    config: RayConfig

    def __init__(self, config: LauncherConfig, context: LaunchContext) -> None:
        """Store the arguments.

        Nothing starts before ``start``, and Ray is connected only when it is needed.
        """
        super().__init__(config, context)
        self._inbox = WorkerInbox(context.peer_s)
        self._cluster: Cluster | None = None
        self._listener: ChannelListener | None = None
        self._reservations: list[Reservation] = []
        self._hosts: PreparedHosts | None = None
        self._places: dict[str, _Place] = {}
        self._actors: dict[str, tuple[Any, Any]] = {}
        """Worker name -> its actor and the Ray reference to its return code."""
        self._workers: dict[str, RayWorker] = {}
        self._num_replaced = 0

    @classmethod
    def probe(cls) -> Availability:
        """Return whether Ray is installed."""
        return Availability.of_distribution("ray")

    def num_devices(self) -> int:
        """Return the number of devices of all hosts of the cluster (L1)."""
        return sum(host.num_devices for host in self._found_hosts)

    def check(self, workers: Sequence[WorkerSpec]) -> None:
        """Raise ConfigError if the devices of a worker are not consecutive devices of one host (L1)."""
        self._bundles(workers)

    def hosts(self, workers: Sequence[WorkerSpec]) -> Mapping[str, str]:
        """Return worker name -> address of the worker's host (L1)."""
        return {
            spec.name: bundle.host.address for bundle in self._bundles(workers) for spec in bundle.workers
        }

    def check_hosts(self) -> None:
        """Raise RunError if a daemon that ``prepare_host`` has started on a living host has died (L10)."""
        if self._hosts is not None:
            self._hosts.check()

    def start(self, workers: Sequence[WorkerSpec]) -> Mapping[str, WorkerHandle]:
        """Reserve devices, prepare the hosts, and start every worker (L2)."""
        try:
            self._start(workers)
        except BaseException:
            self.close()
            raise
        return {spec.name: self._workers[spec.name] for spec in workers}

    def replace(self, worker: WorkerHandle) -> WorkerHandle:
        """Kill what is left of the worker, and start a new actor for it (L11).

        The worker gets the same devices or, if its host is lost, devices of another host.
        """
        assert self._cluster is not None
        lost = not self._cluster.lives(self._places[worker.name].host)
        self._end_worker(worker.name, 0.0 if lost else UNKILLABLE_S)
        self._num_replaced += 1
        shown = f"{worker.name}, {self._num_replaced}. replacement"
        if lost:
            self._move(worker.name, shown)
        self._start_actor(worker.name, shown)
        self._connect([worker.name])
        return self._workers[worker.name]

    def _end_worker(self, name: str, limit_s: float) -> None:
        """Make the actor kill what is left of its worker; an earlier attempt may have done so already."""
        import ray

        if (old := self._workers.pop(name, None)) is not None:
            self._inbox.forget(old)
            old.channel.close()
        if (found := self._actors.pop(name, None)) is not None:
            actor, code = found
            actor.end.remote()
            ray.wait([code], timeout=limit_s)
            ray.kill(actor)

    def _move(self, name: str, shown: str) -> None:
        """Reserve devices on another host for a worker whose host is lost.

        ``shown``: the worker's name in Ray's dashboard. Raise NoDevices if none are free, HostLost if this
        run cannot use other hosts.
        """
        from spec_launcher_ray import cluster

        assert self._cluster is not None
        assert self._hosts is not None
        spec, lost = self._places[name].spec, self._places[name].host
        if self._places[name].address == LOOPBACK:  # no other host reaches this run
            raise HostLost(f"{name} cannot be started again: {_gone(lost)}")
        try:
            hosts = self._cluster.hosts(self._resource)
        except ConfigError as error:  # one of launcher.hosts is lost
            raise NoDevices(f"{name} has lost its host {lost.address}: {error}") from error
        roomy = [host for host in hosts if host.num_free >= spec.num_devices]
        if not roomy:
            wanted = f"{spec.num_devices} free {self._resource}"
            raise NoDevices(f"{name} has lost its host {lost.address}, and no other has {wanted}")
        (bundle,) = DeviceTable(roomy[:1]).bundles([replace(spec, first_device=0)])
        try:
            self._hosts.prepare([bundle.host])
            reservation = cluster.Reservation(f"{self._run_name} {shown}", self._resource, [bundle], _MOVE_S)
        except SpecError as error:
            raise NoDevices(f"{name} cannot be moved to another host: {error}") from error
        try:
            self._place(reservation, [bundle], bundle.host.address)
        except RunError:
            self._reservations.remove(reservation)
            reservation.close()  # so that its devices are free for the next attempt
            raise

    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """Wait for the next event of any worker and return it (L3)."""
        return self._inbox.receive(deadline_s)

    def wake(self) -> None:
        """Make the current or the next call of ``receive`` return None."""
        self._inbox.wake()

    def stop(self, grace_s: float) -> None:
        """Close the channels, wait, kill what is left of the workers, and release all devices (L7)."""
        for worker in self._workers.values():
            worker.channel.close()
        self._end_workers(grace_s)
        self._inbox.close()
        if self._hosts is not None:
            self._hosts.leave()
        if self._listener is not None:
            self._listener.close()
            self._witness.unlink(missing_ok=True)
        for reservation in self._reservations:
            reservation.close()
        if self._cluster is not None:
            self._cluster.close()
        self._workers, self._places, self._actors = {}, {}, {}
        self._hosts = self._listener = self._cluster = None
        self._reservations = []

    @property
    def _resource(self) -> str:
        return self.config.resource_of(self.context.backend.device_type)

    @cached_property
    def _found_hosts(self) -> list[Host]:
        """The hosts of the running cluster, or of the cluster that ``start`` would start."""
        from spec_launcher_ray import cluster
        from spec_launcher_ray.connection import named_address

        address = named_address(self.config, os.environ.get("RAY_ADDRESS"))
        if address is None:
            return [cluster.own_host(super().num_devices())]
        self._cluster = cluster.Cluster(self.config, address)
        return self._cluster.hosts(self._resource)

    def _bundles(self, workers: Sequence[WorkerSpec], hosts: Sequence[Host] | None = None) -> list[Bundle]:
        """Return the bundles of the workers. Hosts are used in the order of ``launcher.hosts``, if it is set."""
        home = None if self._cluster is None or self.config.hosts else self._cluster.own_address
        return place(self._found_hosts if hosts is None else hosts, workers, self.config.spread, home)

    def _start(self, workers: Sequence[WorkerSpec]) -> None:
        from spec_launcher_ray import cluster
        from spec_launcher_ray.connection import named_address
        from spec_launcher_ray.prepared_hosts import PreparedHosts

        if self._cluster is None:
            address = named_address(self.config, os.environ.get("RAY_ADDRESS"))
            self._cluster = cluster.Cluster(self.config, address)
        bundles = self._bundles(workers, self._cluster.hosts(self._resource))
        own = self._cluster.own_address
        here = all(bundle.host.address == own for bundle in bundles)
        self._listener = ChannelListener(LOOPBACK if here else own, self.context.logs.absolute())
        self._witness.touch()
        self._hosts = PreparedHosts(self._cluster, self.context, self._resource, self._actor_name)
        self._hosts.prepare(dict.fromkeys(bundle.host for bundle in bundles))
        reservation = cluster.Reservation(self._run_name, self._resource, bundles, self.config.resources_s)
        self._place(reservation, bundles, LOOPBACK if here else None)
        for name in self._places:
            self._start_actor(name, name)
        self._connect(self._places)

    @property
    def _run_name(self) -> str:
        """Name of the run, for Ray's dashboard."""
        return self.context.logs.absolute().parent.name

    def _actor_name(self, what: str) -> str:
        """Return an actor's name for Ray's dashboard; a suffix makes it unique within the job."""
        assert self._listener is not None
        return f"{self._run_name} {what} ({self._listener.token[:4]})"

    def _place(self, reservation: Reservation, bundles: Sequence[Bundle], address: str | None = None) -> None:
        """Store the devices and Ray options of each worker in the reserved bundles.

        ``address``: the workers' ``RunLink.address``, if it is the same for all.
        """
        self._reservations.append(reservation)
        assert self._hosts is not None
        for bundle, index, first in self._hosts.devices(reservation, bundles):
            reachable = address or bundle.host.address
            envs = self._hosts.env(bundle, first, reachable)
            for spec in bundle.workers:
                self._places[spec.name] = _Place(
                    spec=spec,
                    env={**envs[spec.name], **self.config.env},
                    options=reservation.options(index, bundle.amount_of(spec)),
                    host=bundle.host,
                    address=reachable,
                )

    def _start_actor(self, name: str, shown: str) -> None:
        """Start the actor that starts the worker ``name``. ``shown``: the actor's name in Ray's dashboard."""
        import ray

        from spec_launcher_ray.actors import WorkerActor

        assert self._listener is not None
        place = self._places[name]
        options = {"name": self._actor_name(shown), "max_concurrency": 2, **place.options}
        actor = ray.remote(WorkerActor).options(**options).remote()
        token = self._listener.token
        code = actor.run.remote(name, place.env, self._log(name), self._listener.address, token)
        self._actors[name] = (actor, code)

    def _connect(self, names: Iterable[str]) -> None:
        """Wait until the workers ``names`` have connected, and send each its first message."""
        assert self._cluster is not None
        assert self._listener is not None
        missing = set(names)
        deadline = time.monotonic() + _START_S
        next_look = time.monotonic() + _HOSTS_LOOK_S
        while missing:
            caller = self._listener.accept(_LOOK_S)
            if caller is None and time.monotonic() >= next_look:
                self._check_hosts_of(missing)
                next_look = time.monotonic() + _HOSTS_LOOK_S
            if caller is None and (failed := self._ended_before(missing)) is not None:
                caller = self._listener.accept(_START_S / 10)  # it may have connected before it ended
                if caller is None:
                    how, _ = ending_of(self._actors[failed][1])
                    raise RunError(f"{failed} cannot be started: {how}; see {self._log(failed)}")
            if caller is None:
                if time.monotonic() >= deadline:
                    raise RunError(f"{', '.join(sorted(missing))} not started by Ray within {_START_S} s")
                continue
            name, end = caller
            if name not in missing:
                end.close()  # its actor was given up
                continue
            missing.remove(name)
            channel = ControlChannel(end, self.context.peer_s)
            place = self._places[name]
            worker = RayWorker(
                name,
                channel,
                code=self._actors[name][1],
                host=place.host,
                cluster=self._cluster,
                alone=place.address == LOOPBACK,
                log=self._log(name),
            )
            self._workers[name] = worker
            worker.begin(place.spec, self.context.peer_s, place.address, reap=True)
            self._inbox.add(worker)

    def _check_hosts_of(self, missing: Iterable[str]) -> None:
        """Raise RunError if the host of a worker that has not connected yet is lost."""
        assert self._cluster is not None
        hosts = {self._places[name].host: name for name in sorted(missing)}
        for host in self._cluster.lost(hosts):
            alone = self._places[hosts[host]].address == LOOPBACK
            raise (HostLost if alone else RunError)(f"{hosts[host]} cannot be started: {_gone(host)}")

    def _ended_before(self, missing: Iterable[str]) -> str | None:
        """Return the name of a worker in ``missing`` that has ended before it connected; None if none has."""
        import ray

        names = {self._actors[name][1]: name for name in missing}
        done, _ = ray.wait(list(names), timeout=0)
        return names[done[0]] if done else None

    def _end_workers(self, grace_s: float) -> None:
        if not self._actors:
            return
        import ray

        names = {code: name for name, (_, code) in self._actors.items()}
        _, left = ray.wait(list(names), num_returns=len(names), timeout=grace_s)
        for code in left:
            log.warning("%s did not end when asked and is killed; its log says where it was", names[code])
            self._actors[names[code]][0].end.remote()
        if left:
            _, left = ray.wait(left, num_returns=len(left), timeout=UNKILLABLE_S)
        for code in left:
            log.error("%s does not die of kill -9: it waits in a driver, or its host is lost", names[code])
        for actor, _ in self._actors.values():
            ray.kill(actor)

    @property
    def _witness(self) -> Path:
        from spec_launcher_ray.actors import witness

        assert self._listener is not None
        return witness(self.context.logs.absolute(), self._listener.token)

    def _log(self, name: str) -> Path:
        return self.context.logs.absolute() / f"{name}.log"


def _gone(host: Host) -> str:
    return f"Ray's node of its host {host.address} does not answer"
