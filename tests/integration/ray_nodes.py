"""A Ray cluster of several nodes on this machine, each with an address of its own, that die and come back."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import psutil

_MARKER = "SPEC_TEST_CLUSTER"
"""Environment variable of everything that the nodes start."""
_STARTED = "spec_processes"
"""Word of the command lines of what a run has started on a node: a worker, its reaper."""
_ACTORS = ("ray::WorkerActor", "ray::HostActor")
"""Titles of a run's actors; a title takes the place of the environment that a process shows."""
_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@dataclass
class RayNodes:
    """The own node, at the address of this host, and further ones at loopback addresses: one device each."""

    cluster: Any
    marker: str
    nodes: dict[str, Any] = field(default_factory=dict)
    """Address -> a node of ``ray.cluster_utils`` that is there, but for the own one."""
    orphans: list[psutil.Process] = field(default_factory=list)
    """Processes of raylets that were killed since."""

    @property
    def address(self) -> str:
        """Return the cluster's address, for ``launcher.address``."""
        return self.cluster.address

    def start(self, address: str) -> None:
        """Run the node at an address."""
        self.nodes[address] = self.cluster.add_node(node_ip_address=address, **_NODE)

    def stop_raylet(self, address: str) -> None:
        """Stop the raylet of a node: connections to it succeed, and it starts nothing."""
        psutil.Process(self.raylet(address)).suspend()

    def kill_own_raylet(self) -> None:
        """Kill the raylet of the own node; the cluster is of no use afterwards."""
        self.cluster.head_node.all_processes["raylet"][0].process.kill()

    def kill_raylet(self, address: str) -> None:
        """Kill the raylet of a node, and nothing else."""
        raylet = psutil.Process(self.raylet(address))
        self.orphans += raylet.children()
        raylet.kill()
        raylet.wait()

    def clear(self, address: str) -> None:
        """Take away what is left of a node whose raylet was killed: nothing of a run."""
        self.nodes.pop(address).kill_all_processes(check_alive=False, allow_graceful=False)

    def raylet(self, address: str) -> int:
        """The raylet's process id."""
        return self.nodes[address].all_processes["raylet"][0].process.pid

    def node_of(self, worker: psutil.Process) -> str | None:
        """Address of the node that a worker is on; None for the own one."""
        parents = {parent.pid for parent in worker.parents()}
        return next((address for address in self.nodes if self.raylet(address) in parents), None)

    def processes(self) -> list[psutil.Process]:
        """Everything of a run on any node: actors, and what they have started."""
        return [
            process for process, words in self._running() if _STARTED in words or words.startswith(_ACTORS)
        ]

    def end(self) -> None:
        """Kill the nodes and everything that they have started."""
        running = list(self._running())
        for node in [*self.nodes.values(), self.cluster.head_node]:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        for process, _ in running:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _running(self) -> Iterator[tuple[psutil.Process, str]]:
        """Yield what raylets have started, and what is marked, with its command line."""
        nodes = [*self.nodes.values(), self.cluster.head_node]
        raylets = {node.all_processes["raylet"][0].process.pid for node in nodes}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                started = process.ppid() in raylets or process in self.orphans
                if started or process.environ().get(_MARKER) == self.marker:
                    yield process, " ".join(process.cmdline())


@contextmanager
def ray_nodes(num_nodes: int) -> Iterator[RayNodes]:
    """Yield a running cluster of that many nodes."""
    from ray.cluster_utils import Cluster

    marker = uuid.uuid4().hex
    # Most of the addresses are no interface's.
    changed = {_MARKER: marker, "RAY_AUTH_MODE": "disabled", "GLOO_SOCKET_IFNAME": "lo"}
    with patch.dict(os.environ, changed):
        head = {**_NODE, "include_dashboard": False}
        nodes = RayNodes(Cluster(initialize_head=True, head_node_args=head), marker)
        try:
            for number in range(2, num_nodes + 1):
                nodes.start(f"127.0.0.{number}")
            yield nodes
        finally:
            nodes.end()
