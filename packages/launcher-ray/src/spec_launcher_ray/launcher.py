"""RayLauncher: the workers of a run in actors of a Ray cluster.

Ray reserves the devices, starts an actor for each worker on the right host, and ends them with the run. Messages do
not pass through Ray: each worker has a control channel to this process, as under ``local``.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core import Launcher, WorkerEnded
from spec_core.errors import ConfigError, RunError, SpecError
from spec_core.processes import ChannelListener, ChannelWorker, ControlChannel, WorkerInbox, ending
from spec_core.records import Availability
from spec_launcher_ray.config import RayConfig
from spec_launcher_ray.placement import DeviceTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from spec_core import LaunchContext, LauncherConfig, WorkerHandle, WorkerMessage, WorkerSpec
    from spec_launcher_ray.cluster import Cluster, Reservation
    from spec_launcher_ray.placement import Bundle, Host

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_UNKILLABLE_S = 10.0
"""Longest wait for a process that is ending; one that waits inside a driver does not end."""
_START_S = 120.0
"""Longest wait for Ray to start the actors, a Python for each, and for their workers to connect."""
_LOOK_S = 0.2
"""Seconds between looks at the actors while workers start."""


@dataclass(eq=False, kw_only=True)
class RayWorker(ChannelWorker):
    """A worker, its actor, and the reference to its return code."""

    actor: Any
    code: Any
    log: Path

    def ending(self) -> WorkerEnded:
        """Return how the worker or its actor has ended."""
        how, killed = _ending(self.code)
        return WorkerEnded(self, f"{how}; see {self.log}", killed)


class RayLauncher(Launcher):
    """Starts each worker in an actor that holds its devices."""

    name: ClassVar[str] = "ray"
    api_version: ClassVar[int] = 2
    Config: ClassVar[type[LauncherConfig]] = RayConfig

    config: RayConfig

    def __init__(self, config: LauncherConfig, context: LaunchContext) -> None:
        """Prepare; nothing starts before ``start``, and nothing connects before it is needed."""
        super().__init__(config, context)
        self._inbox = WorkerInbox(context.peer_s)
        self._cluster: Cluster | None = None
        self._listener: ChannelListener | None = None
        self._reservation: Reservation | None = None
        self._hosts: dict[Host, Any] = {}
        """Actor of each host."""
        self._watches: dict[Any, Host] = {}
        """Reference that is done when something on the host has died."""
        self._actors: dict[str, tuple[Any, Any]] = {}
        """Actor of each worker, and the reference to its return code."""
        self._workers: list[RayWorker] = []

    @classmethod
    def probe(cls) -> Availability:
        """Return whether Ray is installed."""
        return Availability.of_distribution("ray")

    def num_devices(self) -> int:
        """Return the number of devices of all hosts of the cluster (L1)."""
        return len(self._table)

    def check(self, workers: Sequence[WorkerSpec]) -> None:
        """Raise ConfigError for a worker whose devices are not neighbours on one host (L1)."""
        self._table.bundles(workers)

    def hosts(self, workers: Sequence[WorkerSpec]) -> Mapping[str, str]:
        """Return the address of each worker's host (L1)."""
        bundles = self._table.bundles(workers)
        return {spec.name: bundle.host.address for bundle in bundles for spec in bundle.workers}

    def check_hosts(self) -> None:
        """Raise RunError, naming the host, if something that ``prepare_host`` has started there has died (L10)."""
        if not self._watches:
            return
        import ray

        done, _ = ray.wait(list(self._watches), timeout=0)
        if done:
            _result(done[0], f"host {self._watches[done[0]].address}")

    def start(self, workers: Sequence[WorkerSpec]) -> Mapping[str, WorkerHandle]:
        """Reserve devices, prepare the hosts, start every worker (L2)."""
        try:
            self._start(workers)
        except BaseException:
            self.close()
            raise
        return {worker.name: worker for worker in self._workers}

    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """Return what comes next from any worker (L3)."""
        return self._inbox.receive(deadline_s)

    def wake(self) -> None:
        """Make ``receive`` return None."""
        self._inbox.wake()

    def stop(self, grace_s: float) -> None:
        """Close the channels, wait, have the actors kill what is left, and give everything back (L7)."""
        for worker in self._workers:
            worker.channel.close()
        self._end_workers(grace_s)
        self._inbox.close()
        self._leave_hosts()
        if self._listener is not None:
            self._listener.close()
        if self._reservation is not None:
            self._reservation.close()
        if self._cluster is not None:
            self._cluster.close()
        self._workers, self._actors, self._hosts, self._watches = [], {}, {}, {}
        self._listener = self._reservation = self._cluster = None

    @property
    def _resource(self) -> str:
        return self.context.backend.ray_resource

    @cached_property
    def _table(self) -> DeviceTable:
        """The devices of a running cluster, or of the one that ``start`` would start."""
        from spec_launcher_ray import cluster

        address = cluster.named_address(self.config, os.environ.get("RAY_ADDRESS"))
        if address is None:
            return DeviceTable([cluster.own_host(super().num_devices())])
        self._cluster = cluster.Cluster(self.config, address)
        return DeviceTable(self._cluster.hosts(self._resource), self.config.spread)

    def _start(self, workers: Sequence[WorkerSpec]) -> None:
        from spec_launcher_ray import cluster

        if self._cluster is None:
            address = cluster.named_address(self.config, os.environ.get("RAY_ADDRESS"))
            self._cluster = cluster.Cluster(self.config, address)
        table = DeviceTable(self._cluster.hosts(self._resource), self.config.spread)
        bundles = table.bundles(workers)
        own = self._cluster.own_address
        here = all(bundle.host.address == own for bundle in bundles)
        self._listener = ChannelListener(_LOOPBACK if here else own)
        self._prepare_hosts(dict.fromkeys(bundle.host for bundle in bundles))
        self._reservation = cluster.Reservation(
            self._run_name, self._resource, bundles, self.config.resources_s
        )
        for bundle, index, first in self._with_devices(bundles):
            address = _LOOPBACK if here else bundle.host.address
            self._start_actors(bundle, index, first, address)
        self._connect(bundles, here)
        by_name = {worker.name: worker for worker in self._workers}
        self._workers = [by_name[spec.name] for spec in workers]

    @property
    def _run_name(self) -> str:
        """Name of the run in Ray's dashboard."""
        return self.context.logs.absolute().parent.name

    def _actor_name(self, what: str) -> str:
        """Return a name for Ray's dashboard; the end of it keeps apart what a job has started one after the other."""
        assert self._listener is not None
        return f"{self._run_name} {what} ({self._listener.token[:4]})"

    def _prepare_hosts(self, hosts: Iterable[Host]) -> None:
        """Start an actor on each host, inside ``prepare_host``."""
        import ray

        from spec_launcher_ray.actors import HostActor, HostNeeds, package_versions
        from spec_launcher_ray.cluster import on_host

        backend = self.context.backend
        needs = HostNeeds(
            (type(backend), backend.config),
            self.context.placement,
            self.context.logs.absolute(),
            package_versions(),
        )
        for host in hosts:
            options = {"name": self._actor_name(f"host {host.address} {host.node[:4]}"), **on_host(host)}
            self._hosts[host] = ray.remote(HostActor).options(max_concurrency=2, **options).remote(needs)
        objections = {host: actor.objection.remote() for host, actor in self._hosts.items()}
        for host, objection in objections.items():
            if words := _result(objection, f"host {host.address}"):
                raise ConfigError(f"host {host.address} {words}")
        prepared = {host: actor.prepare.remote() for host, actor in self._hosts.items()}
        for host, done in prepared.items():
            _result(done, f"host {host.address}")
        self._watches = {actor.watch.remote(): host for host, actor in self._hosts.items()}

    def _with_devices(self, bundles: Sequence[Bundle]) -> list[tuple[Bundle, int, int]]:
        """Return each bundle with the number of its reservation and its first device on its host.

        The reservations of a host are taken in the order of their devices, whatever Ray has given to which.
        """
        import ray

        from spec_launcher_ray.actors import device_ids
        from spec_launcher_ray.cluster import has_ids

        if not has_ids(self._resource):
            return [(bundle, number, bundle.devices.start) for number, bundle in enumerate(bundles)]
        assert self._reservation is not None
        ids = [
            ray.remote(device_ids)
            .options(**self._reservation.options(number, bundle.amount))
            .remote(self._resource)
            for number, bundle in enumerate(bundles)
        ]
        devices: list[list[int]] = []
        for bundle, found in zip(bundles, ids, strict=True):
            who = f"host {bundle.host.address}"
            ranks = self._hosts[bundle.host].local_ranks.remote(_result(found, who))
            devices.append(neighbours(_result(ranks, who), who))
        return [(bundle, number, devices[number][0]) for bundle, number in in_order(bundles, devices)]

    def _start_actors(self, bundle: Bundle, reserved: int, first: int, address: str) -> None:
        """Start the actors of a bundle's workers; each starts its worker."""
        import ray

        from spec_launcher_ray.actors import WorkerActor

        assert self._reservation is not None
        assert self._listener is not None
        offset = first - min(spec.first_device for spec in bundle.workers)
        places = [(replace(spec, order={}), spec.first_device + offset) for spec in bundle.workers]
        host = self._hosts[bundle.host]
        envs = _result(host.env.remote(places, address), f"host {bundle.host.address}")
        for spec in bundle.workers:
            options = self._reservation.options(reserved, bundle.amount_of(spec))
            actor = (
                ray.remote(WorkerActor)
                .options(name=self._actor_name(spec.name), max_concurrency=2, **options)
                .remote()
            )
            env = {**envs[spec.name], **self.config.env}
            code = actor.run.remote(
                spec.name, env, self._log(spec.name), self._listener.address, self._listener.token
            )
            self._actors[spec.name] = (actor, code)

    def _connect(self, bundles: Sequence[Bundle], here: bool) -> None:
        """Wait until every worker has connected, and send it what it is to do."""
        assert self._listener is not None
        missing = {spec.name: (spec, bundle.host) for bundle in bundles for spec in bundle.workers}
        deadline = time.monotonic() + _START_S
        while missing:
            caller = self._listener.accept(_LOOK_S)
            if caller is None and (failed := self._ended_before(missing)) is not None:
                caller = self._listener.accept(_START_S / 10)  # it may have connected before it ended
                if caller is None:
                    how, _ = _ending(self._actors[failed][1])
                    raise RunError(f"{failed} cannot be started: {how}; see {self._log(failed)}")
            if caller is None:
                if time.monotonic() >= deadline:
                    raise RunError(f"{', '.join(missing)} not started by Ray within {_START_S} s")
                continue
            name, end = caller
            spec, host = missing.pop(name)
            actor, code = self._actors[name]
            channel = ControlChannel(end, self.context.peer_s)
            worker = RayWorker(name, channel, actor=actor, code=code, log=self._log(name))
            self._workers.append(worker)
            worker.begin(spec, self.context.peer_s, _LOOPBACK if here else host.address, reap=True)
            self._inbox.add(worker)

    def _ended_before(self, missing: Iterable[str]) -> str | None:
        """Return a worker that has ended and is still missing."""
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
            log.warning("%s did not end when asked and is killed", names[code])
            self._actors[names[code]][0].end.remote()
        if left:
            _, left = ray.wait(left, num_returns=len(left), timeout=_UNKILLABLE_S)
        for code in left:
            log.error("%s does not die of kill -9: it waits in a driver, or its host is lost", names[code])
        for actor, _ in self._actors.values():
            ray.kill(actor)

    def _leave_hosts(self) -> None:
        if not self._hosts:
            return
        import ray

        left = [actor.leave.remote() for actor in self._hosts.values()]
        ray.wait(left, num_returns=len(left), timeout=_UNKILLABLE_S)
        for actor in self._hosts.values():
            ray.kill(actor)

    def _log(self, name: str) -> Path:
        return self.context.logs.absolute() / f"{name}.log"


def neighbours(devices: list[int], who: str) -> list[int]:
    """Return the devices of a bundle. Raise RunError where they are not neighbours: a backend gives no others."""
    if devices != list(range(devices[0], devices[0] + len(devices))):
        raise RunError(
            f"{who}: Ray has reserved devices {devices}, which are not neighbours; free more of this host"
        )
    return devices


def in_order(bundles: Sequence[Bundle], devices: Sequence[list[int]]) -> Iterator[tuple[Bundle, int]]:
    """Yield each bundle with the number of the reservation for it: those of a host and size in order of devices."""
    alike: dict[tuple[Host, int], list[int]] = {}
    for number, bundle in enumerate(bundles):
        alike.setdefault((bundle.host, len(bundle.devices)), []).append(number)
    for numbers in alike.values():
        for number, reserved in zip(numbers, sorted(numbers, key=devices.__getitem__), strict=True):
            yield bundles[number], reserved


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _result(reference: Any, who: str) -> Any:
    """Return what an actor or a task has returned. Raise its error, or RunError for what has happened to it."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SpecError):
            raise type(cause)(f"{who}: {cause}") from error
        raise RunError(f"{who}: {type(cause).__name__}: {_first_line(cause)}") from error
    except ray.exceptions.RayError as error:
        raise RunError(f"{who}: {_why(error)}") from error


def _ending(code: Any) -> tuple[str, bool]:
    """Return how a worker has ended, and whether it was killed, given the reference to its return code."""
    import ray

    try:
        number = ray.get(code, timeout=_UNKILLABLE_S)
    except ray.exceptions.GetTimeoutError:
        return "has closed its connection to the launcher and does not end", False
    except ray.exceptions.RayTaskError as error:
        return f"did not start: {_first_line(error.cause)}", False
    except ray.exceptions.RayError as error:
        return f"was lost with its Ray actor: {_why(error)}", True
    return ending(number), number == -signal.SIGKILL


def _why(error: Exception) -> str:
    """Return the cause in Ray's message of many lines."""
    text = " ".join(str(error).split())
    _, found, cause = text.partition("is dead because ")
    return cause.partition(".")[0] if found else text[:300]
