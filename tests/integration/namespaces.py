"""Hosts of a Ray cluster on one machine: network namespaces with addresses of their own, on one bridge."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spec_testing.limits import patient

from .launching import until

_RAY = Path(sys.executable).with_name("ray")
_PACKAGES = {"ip": "iproute2", "unshare": "util-linux"}
"""Program -> the package that has it."""
_NETWORK = "10.231.7"
_START_S = patient(240.0)
_NODE = ["--num-cpus=2", f"--object-store-memory={80 << 20}", "--disable-usage-stats", "--block"]
_ALONE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


@dataclass(frozen=True)
class RayHosts:
    """A cluster of this machine, number 1, and further hosts that share neither processes nor ``hidden`` with it."""

    hidden: Path
    """Folder of which each host has another one, empty at first."""
    name: str
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Number of a host -> its ``ray start``."""

    @property
    def address(self) -> str:
        """Address of the cluster, for ``launcher.address``."""
        return f"{self.host(1)}:26379"

    def host(self, number: int) -> str:
        """Address of a host."""
        return f"{_NETWORK}.{number}"

    def cut(self, number: int) -> None:
        """Cut the link to a host; nobody is told."""
        _ip(f"link set {self.name}v{number} down")

    def start(self, number: int) -> None:
        """Run the cluster's node of a host, and wait until the cluster has it."""
        import ray

        words = [str(_RAY), "start", f"--node-ip-address={self.host(number)}", *_NODE]
        if number == 1:
            words += ["--head", "--port=26379", "--include-dashboard=false"]
        else:
            alone = f'mount -t tmpfs none "{self.hidden}" && exec "$@"'
            words = ["sh", "-c", alone, "sh", *words, f"--address={self.address}"]
            words = ["ip", "netns", "exec", f"{self.name}{number}", *_ALONE, *words]
        known = {node["NodeID"] for node in ray.nodes()} if number > 1 else ()
        with (self.hidden.parent / f"node-{number}.log").open("ab") as output:
            self.processes[number] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_AUTH_MODE": "disabled"},
                start_new_session=True,
            )
        if number == 1:
            until(lambda: _connected(ray, self.address), _START_S)
        until(lambda: any(node["Alive"] and node["NodeID"] not in known for node in ray.nodes()), _START_S)

    def stop(self, number: int) -> None:
        """Kill everything that runs on a host; nobody is told."""
        process = self.processes.pop(number)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ray_hosts(hidden: Path, num_hosts: int) -> Iterator[RayHosts]:
    """Yield a running cluster of that many hosts; skip the test where this machine cannot have namespaces."""
    import ray

    if why := _objection():
        pytest.skip(why)
    hidden.mkdir()
    hosts = RayHosts(hidden, f"sp{os.getpid() % 100_000}")
    with ExitStack() as stack:
        try:
            _connect(hosts, num_hosts, stack)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.cmd}: {error.stderr.strip()}")
        stack.enter_context(_disconnected(ray))
        for number in range(1, num_hosts + 1):  # one after the other: they share a temporary folder
            stack.callback(lambda number=number: number in hosts.processes and hosts.stop(number))
            hosts.start(number)
        stack.callback(ray.shutdown)
        yield hosts


@contextmanager
def _disconnected(ray: Any) -> Iterator[None]:
    """Let this process connect to another cluster than that of the fixture ``ray_cluster``, which gets it back."""
    before = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
    ray.shutdown()
    try:
        yield
    finally:
        ray.shutdown()
        if before is not None:
            ray.init(before, log_to_driver=False, configure_logging=False)


def _objection() -> str:
    """Return what this machine lacks for hosts of its own; empty if nothing is known to be missing."""
    if not _RAY.exists():
        return f"there is no {_RAY}"
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [f"{name} (package {_PACKAGES[name]})" for name in _PACKAGES if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _connect(hosts: RayHosts, num_hosts: int, stack: ExitStack) -> None:
    name, bridge = hosts.name, f"{hosts.name}br"
    _ip(f"link add {bridge} type bridge")
    stack.callback(_ip, f"link del {bridge}")
    _ip(f"addr add {hosts.host(1)}/24 dev {bridge}")
    _ip(f"link set {bridge} up")
    for number in range(2, num_hosts + 1):
        space = f"{name}{number}"
        _ip(f"netns add {space}")
        stack.callback(_ip, f"netns del {space}")
        _ip(f"link add {name}v{number} type veth peer name {name}e{number} netns {space}")
        _ip(f"link set {name}v{number} master {bridge} up")
        _ip(f"-n {space} addr add {hosts.host(number)}/24 dev {name}e{number}")
        _ip(f"-n {space} link set {name}e{number} up")
        _ip(f"-n {space} link set lo up")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def _connected(ray: object, address: str) -> bool:
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)  # type: ignore[attr-defined]
    except (ConnectionError, RuntimeError, ValueError):
        return False
    return True
