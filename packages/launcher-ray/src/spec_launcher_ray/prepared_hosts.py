"""PreparedHosts starts an actor on each host of a run, which keeps ``Backend.prepare_host`` open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from spec_core import LaunchContext
from spec_core.errors import ConfigError, SpecError
from spec_launcher_ray.actors import HostActor, HostNeeds, device_ids, package_versions
from spec_launcher_ray.cluster import Cluster, Reservation, has_ids, on_host
from spec_launcher_ray.outcomes import UNKILLABLE_S, result
from spec_launcher_ray.placement import Bundle, Host, in_order, neighbours

log = logging.getLogger(__name__)


class PreparedHosts:
    """Manages the HostActors of a run. Errors of a HostActor name the host."""

    def __init__(
        self, cluster: Cluster, context: LaunchContext, resource: str, named: Callable[[str], str]
    ) -> None:
        """Store the arguments; no host is prepared yet.

        ``resource``: name of the Ray resource that stands for devices, such as "GPU". ``named``: a function that
        returns the name of an actor in Ray's dashboard.
        """
        self._cluster = cluster
        self._named = named
        backend = context.backend
        self._resource = resource
        self._needs = HostNeeds((type(backend), backend.config), context.placement, package_versions())
        self._actors: dict[Host, Any] = {}
        self._watches: dict[Any, Host] = {}
        """Ray reference -> host. A reference is done when a daemon on the host has died."""

    def prepare(self, hosts: Collection[Host]) -> None:
        """Prepare the hosts that are not prepared yet.

        Raise ConfigError if a host cannot run workers of this run.
        """
        new = {host: self._start_actor(host) for host in hosts if host not in self._actors}
        objections = {host: actor.objection.remote() for host, actor in new.items()}
        for host, objection in objections.items():
            if words := result(objection, f"host {host.address}"):
                ray.kill(new[host])  # frees the actor's name
                raise ConfigError(f"host {host.address} {words}")
        self._actors |= new
        prepared = {host: actor.prepare.remote() for host, actor in new.items()}
        for host, done in prepared.items():
            try:
                result(done, f"host {host.address}")
            except SpecError:
                ray.kill(self._actors.pop(host))
                raise
        self._watches |= {actor.watch.remote(): host for host, actor in new.items()}

    def check(self) -> None:
        """Raise RunError if a daemon that ``prepare_host`` has started has died; forget hosts that are lost."""
        done, _ = ray.wait(list(self._watches), timeout=0)
        for watch in done:
            host = self._watches[watch]
            if self._cluster.lives(host):
                result(watch, f"host {host.address}")
            log.warning("host %s is lost", host.address)
            del self._watches[watch], self._actors[host]

    def leave(self) -> None:
        """Leave the context ``Backend.prepare_host`` on every host."""
        left = [actor.leave.remote() for actor in self._actors.values()]
        if left:
            ray.wait(left, num_returns=len(left), timeout=UNKILLABLE_S)
        for actor in self._actors.values():
            ray.kill(actor)

    def devices(self, reservation: Reservation, bundles: Sequence[Bundle]) -> list[tuple[Bundle, int, int]]:
        """Return each bundle with the index of its reserved bundle and its first device on its host.

        Reserved bundles of a host are assigned in the order of their devices.
        """
        if not has_ids(self._resource):
            return [(bundle, number, bundle.devices.start) for number, bundle in enumerate(bundles)]
        ids = [
            ray.remote(device_ids)
            .options(**reservation.options(number, bundle.amount))
            .remote(self._resource)
            for number, bundle in enumerate(bundles)
        ]
        devices: list[list[int]] = []
        for bundle, found in zip(bundles, ids, strict=True):
            who = f"host {bundle.host.address}"
            ranks = self._actors[bundle.host].local_ranks.remote(result(found, who))
            devices.append(neighbours(result(ranks, who), who))
        return [(bundle, number, devices[number][0]) for bundle, number in in_order(bundles, devices)]

    def env(self, bundle: Bundle, first: int, address: str) -> Mapping[str, Mapping[str, str]]:
        """Return worker name -> environment for the workers of a bundle.

        ``first``: index of the bundle's first device on its host.
        """
        offset = first - min(spec.first_device for spec in bundle.workers)
        places = [(replace(spec, arguments={}), spec.first_device + offset) for spec in bundle.workers]
        env = self._actors[bundle.host].env.remote(places, address)
        return result(env, f"host {bundle.host.address}")

    def _start_actor(self, host: Host) -> Any:
        options = {"name": self._named(f"host {host.address} {host.node[:4]}"), **on_host(host)}
        return ray.remote(HostActor).options(max_concurrency=2, **options).remote(self._needs)
