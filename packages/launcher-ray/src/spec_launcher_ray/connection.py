"""Connect to a running Ray cluster at a configured address, or start a cluster on this host."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.job_config import JobConfig

from spec_core.errors import ConfigError, RunError, SpecError, first_line
from spec_launcher_ray.config import RayConfig

log = logging.getLogger(__name__)

_CONNECT_S = 10.0
"""Longest wait, in seconds, for a cluster's port to answer; Ray itself waits for minutes."""
_START_TRIES = 4
"""Number of attempts to start a cluster. Ray gives its agents 15 s and its node 30 s to start, which no
setting changes. A loaded host may need longer; at the next attempt the programs' files are in the page cache."""
_OWN_PACKAGES = JobConfig(_client_job=True)
"""Settings of the connection. Without the flag, Ray lets workers import from this process's working directory, too.

No public setting prevents this. ray._private.worker.connect adds the directory unless the job comes from Ray's
client or has a ``working_dir``, which would be uploaded and become the workers' working directory.
ray-project/ray#43214 did not add a directory that is invalid on other hosts; ray-project/ray#44435 reverted it.
"""


@dataclass(frozen=True)
class ClusterAddress:
    """The address of a running cluster, and where it was configured."""

    value: str
    source: str
    """Configuration key or environment variable that gave the address."""

    def __str__(self) -> str:
        """Return address and source, for messages."""
        return f"{self.source}={self.value}"


def named_address(config: RayConfig, environ_address: str | None) -> ClusterAddress | None:
    """Return the address of the running cluster to use; None if a cluster is to be started."""
    if config.address is not None:
        return ClusterAddress(config.address, "launcher.address")
    if ray.is_initialized():
        return ClusterAddress("auto", "launcher.address")
    return ClusterAddress(environ_address, "RAY_ADDRESS") if environ_address else None


def check_address(address: ClusterAddress) -> None:
    """Raise ConfigError if the address is invalid or does not answer; Ray itself would retry for minutes."""
    if "://" in address.value:
        raise ConfigError(
            f"{address}: the run itself must be on a host of the cluster; give HOST:PORT as ray start prints it"
        )
    host, _, port = address.value.rpartition(":")
    if not port.isdecimal():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{address}: no Ray cluster answers there ({error})") from error


def connect_cluster(address: ClusterAddress) -> None:
    """Connect this process to a running cluster. Raise ConfigError if the connection fails."""
    with _own_signal_handler(), _errors_of_ray(ConfigError, f"{address} cannot be used"):
        _init(address.value)


def start_cluster() -> None:
    """Start a cluster on this host and connect to it; it ends with this process.

    Raise RunError if the cluster does not start.
    """
    with _own_signal_handler():
        for number in range(1, _START_TRIES + 1):
            before = set(psutil.Process().children())
            try:
                with _errors_of_ray(RunError, "Ray does not start on this host"):
                    _init("local", include_dashboard=False)
                return
            except RunError as error:
                _end(set(psutil.Process().children()) - before)
                if number == _START_TRIES or isinstance(error.__cause__, ValueError):  # no timeout
                    logs = f"{get_default_ray_temp_dir()}/session_latest/logs"
                    raise RunError(f"{error} (try {number} of {_START_TRIES}); see {logs}") from error
                log.warning("%s (try %d of %d); it is started again", error, number, _START_TRIES)


def _init(address: str, **options: bool) -> None:
    ray.init(address, log_to_driver=False, configure_logging=False, job_config=_OWN_PACKAGES, **options)


@contextmanager
def _errors_of_ray(error_type: type[SpecError], problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray raises Exception itself, too
        raise error_type(f"{problem}: {type(error).__name__}: {first_line(error)}") from error


def _end(processes: set[psutil.Process]) -> None:
    """Kill the processes that remain after Ray failed to start a node."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces; on SIGTERM the run saves a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
