"""This module has the Ray actors of a run: a HostActor per host, and a WorkerActor per worker.

A worker is a child process of its actor, as it is a child of the launcher's process with ``local``. So the worker's
exit code is known exactly, the backend sets its environment before it starts, and no code of Ray runs in it.

An actor ends itself when the raylet that has started it ends. Ray would let the actor live: it would outlive the
run, and a node that rejoins would give its devices to other actors.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import psutil
import ray

from spec_core import Backend, BackendConfig, WorkerSpec
from spec_core.errors import RunError
from spec_core.records import Availability
from spec_processes import (
    WORKER_MODULE,
    ask_for_stacks,
    connect_channel,
    connect_output,
    die_with_parent,
    end_group,
    spawn_on,
)

_CONNECT_S = 30.0
_CHECK_S = 0.5
"""Seconds between two checks of the daemons that the backend has started on the host."""
_PACKAGES = ("spec-core", "spec-launcher-ray", "torch", "transformers")
"""Distributions whose version must be the same on every host."""


def package_versions() -> dict[str, str]:
    """Return name -> version of the distributions whose versions must be equal on every host."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        found |= Availability.of_distribution(name).versions
    return found


@dataclass(frozen=True)
class HostNeeds:
    """Conditions that a host must meet for a run, and the arguments with which the host is prepared."""

    backend: tuple[type[Backend], BackendConfig]
    placement: Literal["inline", "colocated", "disaggregated"]
    versions: Mapping[str, str]


class HostActor:
    """Ray actor that prepares one host of the run and holds ``Backend.prepare_host`` on it."""

    def __init__(self, needs: HostNeeds) -> None:
        """Construct the backend. The host is not prepared yet."""
        backend_type, config = needs.backend
        self._backend = backend_type(config)
        self._needs = needs
        self._stack = ExitStack()
        self._left = threading.Event()
        self._raylet = os.getppid()

    def objection(self) -> str:
        """Return why the host cannot run workers of this run; empty if it can."""
        for name, version in self._needs.versions.items():
            if (here := package_versions().get(name)) != version:
                return (
                    f"has {name} {here or 'not'} installed, the run {version}: install the same on every host"
                )
        available = self._backend.probe()
        if not available.ok:
            return f"cannot run backend {self._backend.name}: {available.reason}"
        return ""

    def prepare(self) -> None:
        """Enter the context ``Backend.prepare_host`` on this host."""
        self._stack.enter_context(self._backend.prepare_host(self._needs.placement))

    def env(self, workers: Sequence[tuple[WorkerSpec, int]], address: str) -> dict[str, dict[str, str]]:
        """Return worker name -> environment variables.

        ``workers``: pairs of a worker and the index of its first device on this host.
        """
        node = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if "GLOO_SOCKET_IFNAME" not in node:
            node["GLOO_SOCKET_IFNAME"] = _interface(address)
        return {spec.name: {**node, **spec.env(self._backend, first)} for spec, first in workers}

    def local_ranks(self, devices: Sequence[str]) -> list[int]:
        """Convert Ray's device ids to indices among the devices that this process sees."""
        return sorted(local_rank(device, os.environ) for device in devices)

    def watch(self) -> None:
        """Call ``Backend.check_host`` repeatedly until ``leave`` is called; its error is raised.

        This process exits if its raylet ends.
        """
        while not self._left.wait(_CHECK_S):
            if os.getppid() != self._raylet:
                self.leave()
                os._exit(1)
            self._backend.check_host()

    def leave(self) -> None:
        """Leave the context ``Backend.prepare_host``."""
        self._left.set()
        self._stack.close()


class WorkerActor:
    """Ray actor that starts one worker process and waits for its end."""

    def __init__(self) -> None:
        """Start no worker yet. This process dies with its parent, the raylet."""
        die_with_parent()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, name: str, env: Mapping[str, str], log: Path, address: str, token: str) -> int:
        """Start the worker with a control channel to the launcher, wait for its end, return its return code.

        If this host does not see the log folder, the output is sent to the launcher. The worker's temporary
        files are then in a folder that is deleted when the worker ends.
        """
        with ExitStack() as stack:
            if witness(log.parent, token).exists():
                output = log.open("ab")
            else:
                output = connect_output(address, token, name, _CONNECT_S)
                env = {**env, "TMPDIR": stack.enter_context(TemporaryDirectory(prefix="spec-worker-"))}
            with output, connect_channel(address, token, name, _CONNECT_S) as end:
                self._process = spawn_on(end, [WORKER_MODULE, name], env, output.fileno())
            code = self._process.wait()
            end_group(self._process.pid)
        return code

    def end(self) -> None:
        """Kill the worker and all processes that it has started, after it has written its stacks to its log."""
        if self._process is not None and self._process.returncode is None:
            ask_for_stacks(self._process)
            end_group(self._process.pid)


def witness(logs: Path, token: str) -> Path:
    """Return the path of a marker file in the log folder; a host sees the folder if the file exists there."""
    return logs / f".run-{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def device_ids(resource: str) -> list[str]:
    """Return Ray's ids of the devices that Ray has assigned to the calling task."""
    return ray.get_runtime_context().get_accelerator_ids()[resource]


def local_rank(device: str, environ: Mapping[str, str]) -> int:
    """Return the index of the device with Ray's id ``device`` among the devices that a process sees.

    If the vendor's variable of visible devices is set, Ray's ids are its entries; otherwise they are indices.
    """
    for name, listed in environ.items():
        if name.endswith("VISIBLE_DEVICES") and device in (visible := listed.split(",")):
            return visible.index(device)
    if not device.isdecimal():
        raise RunError(f"Ray names a device {device!r}, which no variable of visible devices lists")
    return int(device)


def _interface(address: str) -> str:
    """Return the name of the network interface that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    raise RunError(f"host {socket.gethostname()} has no network interface of address {address}")
