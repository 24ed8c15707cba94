"""Hosts of a cluster, as Ray lists them."""

import socket
from types import SimpleNamespace

import pytest

from spec_core.errors import ConfigError

ray = pytest.importorskip("ray")
cluster = pytest.importorskip("spec_launcher_ray.cluster")
config = pytest.importorskip("spec_launcher_ray.config")
connection = pytest.importorskip("spec_launcher_ray.connection")

HERE = "127.0.0.1"


@pytest.fixture
def hosts_with(monkeypatch):
    """``hosts_with(*resources)``: the hosts of a cluster of nodes that answer and have these."""
    with socket.create_server((HERE, 0)) as raylet:
        port = raylet.getsockname()[1]

        def listed(*resources):
            nodes = [
                {
                    "NodeID": f"node-{number}",
                    "NodeName": HERE,
                    "NodeManagerHostname": HERE,
                    "NodeManagerAddress": HERE,
                    "NodeManagerPort": port,
                    "Alive": True,
                    "Labels": {},
                    "Resources": {f"node:{HERE}": 1.0, "memory": 1e9, **found},
                }
                for number, found in enumerate(resources)
            ]
            free = {node["NodeID"]: node["Resources"] for node in nodes}
            monkeypatch.setattr(ray, "is_initialized", lambda: True)
            monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="HEAD:1"))
            monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: HERE)
            monkeypatch.setattr(ray, "nodes", lambda: nodes)
            monkeypatch.setattr(cluster, "available_resources_per_node", lambda: free)
            address = connection.ClusterAddress("auto", "launcher.address")
            return cluster.Cluster(config.RayConfig(), address).hosts("CPU")

        yield listed


@pytest.mark.parametrize(
    ("resources", "offered"), [({}, "nothing"), ({"CPU": 0.5}, "CPU 0.5"), ({"GPU": 2.0}, "GPU 2")]
)
def test_a_cluster_with_too_few_cpus_is_refused_with_what_it_has(hosts_with, resources, offered):
    words = f"^the Ray cluster at HEAD:1 has no host with the resource CPU: {HERE} has {offered}$"
    with pytest.raises(ConfigError, match=words):
        hosts_with(resources)


def test_hosts_without_a_cpu_are_left_out(hosts_with):
    (host,) = hosts_with({}, {"CPU": 1.0})
    assert (host.node, host.num_devices, host.num_free) == ("node-1", 1, 1)
