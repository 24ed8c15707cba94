"""A Launcher starts the workers of a run, carries their messages, and lets no worker outlive the run.

A *worker* is a process of the run: an engine replica or a trainer rank. A message is an object that JSON can
hold; it never carries a tensor. A launcher does not interpret messages; the run and its workers agree on
their meaning.

Contract (``spec_testing.LauncherSuite`` quotes the numbers):

L1  Constructing a launcher starts nothing and creates no file. ``check`` raises UsageError, one line, for
    workers that this launcher can never place; ``hosts`` names the host of each worker. Neither starts a worker.
L2  ``start`` returns a handle for each worker, by name, or raises RunError with no worker running. Each worker
    calls its entry once, in the main thread of a separate process. That process has the launcher's environment with
    the variables that ``WorkerSpec.env`` returns, and the launcher's priority (niceness).
L3  ``receive`` returns the messages of each worker in the order in which they were sent, and then exactly one
    WorkerEnded, whatever ended the worker: its entry returned, it exited, or it was killed.
    ``WorkerEnded.killed`` is True if the worker was killed with SIGKILL, ended with its machine, or went silent.
L4  From ``WorkerHandle.watch`` on, a worker from which nothing has arrived for ``peer_s`` seconds counts as
    ended. A worker that computes is not silent; a stopped worker (SIGSTOP) is silent.
L5  ``WorkerHandle.send`` keeps the order of messages. It does nothing for a worker that has ended, and raises
    DeadlineExceeded if the worker's process has read nothing for ``peer_s`` seconds.
L6  ``RunLink.receive`` returns None, and ``RunLink.send`` raises PeerLost, once the launcher stops the worker.
    ``RunLink.address`` is the host under which other workers reach this one, LOOPBACK if all workers are on one
    host.
L7  ``stop`` first lets workers end by themselves (L6), for ``grace_s`` seconds, and then kills them.
    Afterwards no worker runs, and no process that a worker has started. ``close`` is ``stop``, and both may
    be called again.
L8  If the launcher's own process is killed, its workers and the processes that they started end within seconds.
L9  The output of a worker is appended to ``logs/NAME.log``, or ``WorkerEnded.how`` says where it is.
L10 While workers run on a host, the launcher keeps the context ``Backend.prepare_host`` open there, and leaves it
    when they have ended. ``check_hosts`` raises RunError if a daemon that this context has started on any of these
    hosts has died. It does not raise for a lost host, because the workers there have ended.
L11 ``replace`` kills what is left of a worker and of the processes that it has started, and starts its WorkerSpec
    again: on the same devices or, if their host is lost, on other devices; with the same log and a new handle.
    Nothing is received from the old worker any more, and other workers are not affected. If the worker cannot be
    started again, ``replace`` raises RunError, and may be called again: NoDevices if no host has free devices now,
    HostLost if no host ever will have any.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from spec_core.config import LauncherConfig
from spec_core.records import Availability
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spec_core.backend import Backend, Placement, Role

LOOPBACK = "127.0.0.1"
"""``RunLink.address`` of the workers if all are on one host (L6)."""

Message = dict[str, Any]
"""A JSON object."""


class RunLink(ABC):
    """A worker's connection to its run."""

    address: str
    """Host name or address under which other workers reach this one (L6)."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message to the run, from any thread. Raise PeerLost if the run has ended (L6)."""

    @abstractmethod
    def receive(self) -> Message | None:
        """Wait for the next message of the run and return it; None once the run has ended (L6)."""


class WorkerMain(Protocol):
    """The function that ``WorkerSpec.entry`` names."""

    def __call__(self, link: RunLink, arguments: Mapping[str, Any]) -> None:
        """Run the worker until its work is done. An exception ends the process with exit code 1."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Description of a worker that a launcher is to start."""

    name: str
    """Name of the worker, unique in the run, such as ``engine-0``."""
    entry: str
    """``package.module:function``, a WorkerMain."""
    arguments: Mapping[str, Any]
    """Second argument of the entry function; a JSON object."""
    role: Role
    """Whether the worker is an engine or a trainer."""
    first_device: int = 0
    """Index of the worker's first device among the ``Launcher.num_devices`` devices of the launcher."""
    num_devices: int = 1
    """Number of devices of the worker, from ``first_device`` on."""
    share: float = 1.0
    """Share of the compute of each of the worker's devices, in (0, 1]."""

    def env(self, backend: Backend, local_rank: int | None = None) -> Mapping[str, str]:
        """Return the environment variables of the worker.

        ``local_rank``: index of the worker's first device on the worker's host. The default, ``first_device``,
        is right if a launcher has one host only.
        """
        first = self.first_device if local_rank is None else local_rank
        return backend.child_env(self.role, self.share, first, self.num_devices)


class WorkerHandle(ABC):
    """A started worker, as the run sees it."""

    name: str
    """Name of the worker, ``WorkerSpec.name``."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message to the worker; do nothing if it has ended (L5).

        Raise DeadlineExceeded if the worker does not read.
        """

    @abstractmethod
    def watch(self) -> None:
        """Watch the worker: from now on, it counts as ended if it is silent for ``peer_s`` seconds (L4).

        It is not watched earlier, because imports and drivers may block its threads.
        """


@dataclass(frozen=True)
class WorkerMessage:
    """A message that a worker has sent."""

    worker: WorkerHandle
    message: Message


@dataclass(frozen=True)
class WorkerEnded:
    """The last event of a worker: the worker has ended (L3)."""

    worker: WorkerHandle
    how: str
    """How the worker ended, as a predicate of its name: ``was killed by signal 9; see LOG``."""
    killed: bool = False
    """True if the cause lies outside the run's own processes: SIGKILL, a lost machine, silence."""
    host_lost: bool = False
    """True if all workers were on one host, which is lost, so that no worker can be started again (L11)."""


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """The arguments that the application passes to a launcher besides its section of the configuration."""

    backend: Backend
    """Backend of the workers. The launcher calls its ``prepare_host`` (L10)."""
    logs: Path
    """Folder for the workers' output. It exists when ``start`` is called."""
    placement: Placement = "disaggregated"
    """How the workers share devices, for ``prepare_host``."""
    peer_s: float = 120.0
    """Seconds of silence after which a worker counts as lost."""


class Launcher(Resource):
    """Starts workers and ends them. All methods but ``wake`` are called from one thread."""

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[LauncherConfig]] = LauncherConfig

    def __init__(self, config: LauncherConfig, context: LaunchContext) -> None:
        """Store the configuration section ``launcher`` and the context; start nothing."""
        self.config = config
        self.context = context

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run the launcher, without starting anything."""
        return Availability(ok=True)

    def num_devices(self) -> int:
        """Return the number of devices for workers on all hosts; by default the number on this host (L1)."""
        return self.context.backend.capabilities().num_devices

    def check(self, workers: Sequence[WorkerSpec]) -> None:
        """Raise UsageError for workers that can never be placed; accept everything by default (L1)."""

    def hosts(self, workers: Sequence[WorkerSpec]) -> Mapping[str, str]:
        """Return worker name -> address of the worker's host; empty if all are on this host, the default (L1)."""
        return {spec.name: "" for spec in workers}

    def check_hosts(self) -> None:
        """Raise RunError if a daemon that ``prepare_host`` has started has died (L10). Cheap; does not wait.

        By default this checks only this host, with ``context.backend``.
        """
        self.context.backend.check_host()

    @abstractmethod
    def start(self, workers: Sequence[WorkerSpec]) -> Mapping[str, WorkerHandle]:
        """Start the workers and return name -> handle.

        If a worker fails to start, end all workers and raise RunError (L2).
        """

    @abstractmethod
    def replace(self, worker: WorkerHandle) -> WorkerHandle:
        """Start a worker again, whether it has ended or not; return its new handle.

        Raise RunError if the worker cannot be started: NoDevices if no devices are free now, HostLost if the
        host of all workers is lost for good (L11).
        """

    @abstractmethod
    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """Wait for the next event of any worker and return it (L3).

        Return None at ``deadline_s``, a time of ``time.monotonic``, or after ``wake``.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make the current or the next call of ``receive`` return None; safe in a signal handler."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """Ask every worker to end, wait up to ``grace_s`` seconds, then kill workers and their children (L7)."""

    def close(self) -> None:
        """Call ``stop`` with ``grace_s`` of 3 seconds (L7)."""
        self.stop(3.0)
