"""A Cluster connects to Ray and lists the hosts for a run; a Reservation reserves devices there."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import (
    available_resources_per_node,  # vLLM counts by it too; the public API has sums alone
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from spec_core.errors import ConfigError, RunError
from spec_launcher_ray.config import RayConfig
from spec_launcher_ray.connection import ClusterAddress, check_address, connect_cluster, start_cluster
from spec_launcher_ray.placement import Bundle, Host
from spec_processes import SAFE_PATH

_ANSWER_S = 5.0
"""Longest wait, in seconds, for a host's port to answer."""
_CORES = "CPU"
"""Ray's resource for CPU cores. All cores of a host together are one device of this project."""
_UNCOUNTED = {"num_cpus": 0, "runtime_env": {"env_vars": {"RAY_worker_niceness": "0", **SAFE_PATH}}}
"""Options of an actor that requests no core. Its niceness equals the run's niceness; by default Ray adds 15.
PYTHONSAFEPATH is set because a running cluster may have been started without it."""
_COUNTED = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Ray resource -> the actor option that requests it, for resources that have such an option."""


class Cluster:
    """This process's connection to Ray."""

    def __init__(self, config: RayConfig, address: ClusterAddress | None) -> None:
        """Connect to the cluster at ``address``, or start one on this host.

        Raise ConfigError if the cluster cannot be used, RunError if it does not start.
        """
        self._config = config
        self._lost: set[str] = set()
        """Ids of nodes that did not answer. They count as lost and are not contacted again."""
        self._owned = not ray.is_initialized()
        """Whether this object has connected to Ray; False if the surrounding program was connected before."""
        if address is not None:
            check_address(address)
        if address is None:
            start_cluster()
        elif self._owned:
            connect_cluster(address)
        elif address.value not in ("auto", ray.get_runtime_context().gcs_address):
            raise ConfigError(f"{address}: this process is connected to {self.where} already")

    @property
    def where(self) -> str:
        """Description of the cluster, for messages."""
        return f"the Ray cluster at {ray.get_runtime_context().gcs_address}"

    @property
    def own_address(self) -> str:
        """Address of this process's host."""
        return ray.util.get_node_ip_address()

    def close(self) -> None:
        """End the connection, and the cluster if this object has started it."""
        if self._owned:
            self._owned = False
            ray.shutdown()

    def hosts(self, resource: str) -> list[Host]:
        """Return the hosts that have the resource and that the configuration allows.

        Raise ConfigError if there are none.
        """
        own = self.own_address
        nodes = sorted(
            self._living(ray.nodes()), key=lambda node: (_address_of(node) != own, _address_of(node))
        )
        chosen = [
            node for node in self._named(nodes) if self._config.labels.items() <= node["Labels"].items()
        ]
        free = available_resources_per_node()
        hosts = [_host(node, resource, free.get(node["NodeID"], {})) for node in chosen]
        if found := [host for host in hosts if host.num_devices > 0]:
            return found
        offered = "; ".join(f"{_address_of(node)} has {_shown(node['Resources'])}" for node in nodes)
        wanted = f" with labels {self._config.labels} and" if self._config.labels else " with"
        raise ConfigError(f"{self.where} has no host{wanted} the resource {resource}: {offered}")

    def lives(self, host: Host) -> bool:
        """Return whether a host is alive."""
        return not self.lost([host])

    def lost(self, hosts: Collection[Host]) -> list[Host]:
        """Return the hosts among ``hosts`` that are not alive."""
        wanted = {host.node for host in hosts}
        living = self._living([node for node in ray.nodes() if node["NodeID"] in wanted])
        there = {node["NodeID"] for node in living}
        return [host for host in hosts if host.node not in there]

    def _living(self, nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the nodes whose raylets accept connections.

        Ray itself may notice a lost node only after a minute.
        """
        alive = [node for node in nodes if node["Alive"] and node["NodeID"] not in self._lost]
        with ThreadPoolExecutor(max_workers=64) as pool:
            answers = list(pool.map(_answers, alive))
        self._lost |= {node["NodeID"] for node, lives in zip(alive, answers, strict=True) if not lives}
        return [node for node in alive if node["NodeID"] not in self._lost]

    def _named(self, nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._config.hosts:
            return list(nodes)
        chosen: list[dict[str, Any]] = []
        for name in self._config.hosts:
            found = [node for node in nodes if name in _names_of(node)]
            if not found:
                known = ", ".join(_address_of(node) for node in nodes)
                raise ConfigError(f"launcher.hosts names {name!r}, which {self.where} does not have: {known}")
            chosen += found
        return chosen


class Reservation:
    """Devices that Ray has reserved: a placement group that has a Ray bundle for each ``Bundle``."""

    def __init__(self, name: str, resource: str, bundles: Sequence[Bundle], resources_s: float) -> None:
        """Wait until the devices are free, and reserve them. After ``resources_s`` seconds raise RunError."""
        self._resource = resource
        self._group: PlacementGroup = placement_group(
            [{resource: bundle.amount} for bundle in bundles],
            name=name,
            bundle_label_selector=[{"ray.io/node-id": bundle.host.node} for bundle in bundles],
        )
        if not self._group.wait(resources_s):
            missing = _missing(resource, bundles)
            self.close()
            raise RunError(
                f"{missing} within launcher.resources_s={resources_s} s; others use the rest, or wait longer"
            )

    def options(self, bundle: int, amount: float) -> dict[str, Any]:
        """Return Ray options for an actor or task that uses ``amount`` of the resource of a bundle."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {**_UNCOUNTED, **self._amount(amount), "scheduling_strategy": strategy}

    def close(self) -> None:
        """Release the devices."""
        remove_placement_group(self._group)

    def _amount(self, amount: float) -> dict[str, Any]:
        if (option := _COUNTED.get(self._resource)) is not None:
            return {option: amount}
        return {"resources": {self._resource: amount}}


def on_host(host: Host) -> dict[str, Any]:
    """Return Ray options for an actor that runs on ``host`` and uses none of the host's resources."""
    return {**_UNCOUNTED, "scheduling_strategy": NodeAffinitySchedulingStrategy(host.node, soft=False)}


def own_host(num_devices: int) -> Host:
    """Return this host as the only host of a cluster that has not been started yet."""
    return Host(address="", num_devices=num_devices, free=num_devices)


def has_ids(resource: str) -> bool:
    """Return whether Ray assigns device ids for a resource."""
    return resource != _CORES


def _answers(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((_address_of(node), node["NodeManagerPort"]), _ANSWER_S).close()
    except OSError:
        return False
    return True


def _host(node: dict[str, Any], resource: str, free: dict[str, float]) -> Host:
    amount = node["Resources"].get(resource, 0.0)
    host = Host(
        address=_address_of(node), node=node["NodeID"], num_devices=int(amount), free=free.get(resource, 0.0)
    )
    return replace(host, num_devices=1, units=amount) if resource == _CORES and amount >= 1 else host


def _missing(resource: str, bundles: Sequence[Bundle]) -> str:
    """Return, for a message, the devices of each host that are not free."""
    free = available_resources_per_node()
    wanted: dict[Host, float] = {}
    for bundle in bundles:
        wanted[bundle.host] = wanted.get(bundle.host, 0.0) + bundle.amount
    short = {
        host: (amount, there)
        for host, amount in wanted.items()
        if (there := free.get(host.node, {}).get(resource, 0.0)) < amount
    }
    found = [
        f"host {host.address} has {there:g} of {amount:g} {resource} free"
        for host, (amount, there) in (
            short or {host: (amount, 0.0) for host, amount in wanted.items()}
        ).items()
    ]
    return ", ".join(found)


def _address_of(node: dict[str, Any]) -> str:
    return node["NodeManagerAddress"]


def _names_of(node: dict[str, Any]) -> tuple[str, ...]:
    return (_address_of(node), node["NodeManagerHostname"], node["NodeName"], node["NodeID"])


def _shown(resources: dict[str, float]) -> str:
    counted = [f"{name} {amount:g}" for name, amount in sorted(resources.items()) if ":" not in name]
    return ", ".join(word for word in counted if "memory" not in word) or "nothing"
